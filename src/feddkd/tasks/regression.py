"""Regression: numbers as targets."""

from typing import Literal

from torch import Tensor
from torch.nn.functional import huber_loss, l1_loss, mse_loss

from feddkd.spec.types import Positive
from feddkd.tasks.formulas import by_example, squared_distance
from feddkd.tasks.task import TASKS, Task, count_of
from feddkd.trees import Tree, map_tensors


@TASKS.register
def regression(*, loss: Literal["mse", "mae", "huber"] = "mse", delta: Positive = 1.0) -> Task:
    """Numbers for each example: outputs and targets (N,) or (N, numbers).

    The loss is the mean over the numbers, as in torch; `delta` is Huber's. The divergence is the
    squared distance.
    """

    def each(output: Tensor, target: Tensor) -> Tensor:
        if loss == "huber":
            return huber_loss(output, target, reduction="none", delta=delta)
        return (mse_loss if loss == "mse" else l1_loss)(output, target, reduction="none")

    def mean(output: Tensor, target: Tensor, share: Tensor) -> Tensor:
        errors = each(by_example(output), by_example(target).to(output.dtype))
        return (errors.mean(-1) * share).sum()

    return Task(
        loss=mean,
        divergence=squared_distance,
        metrics=("rmse", "mae", "r2", "loss"),
        offers=frozenset({"features"}),
        check=_check_numbers,
        prepare=lambda target: map_tensors(Tensor.double, target),
        outputs=lambda target, classes: count_of(target),
    )


def _check_numbers(x: Tree, output: Tensor, target: Tree) -> str:
    words = "it needs an output for each number of a target, both of shape (N,) or (N, numbers)"
    if not isinstance(target, Tensor) or max(output.dim(), target.dim()) > 2:
        return words
    return "" if output[0].numel() == target[0].numel() else words
