"""Tasks with labels of whole examples: one of several classes, one of two, or several at once."""

from torch import Tensor

from feddkd.tasks.formulas import (
    binary_cross_entropy,
    by_example,
    cross_entropy,
    soft_binary_cross_entropy,
    soft_cross_entropy,
)
from feddkd.tasks.task import TASKS, Task, count_of
from feddkd.trees import Tree, map_tensors


@TASKS.register
def classification() -> Task:
    """One class for each example: logits (N, C), labels (N,); cross-entropy of softmax."""
    return Task(
        loss=cross_entropy,
        divergence=soft_cross_entropy,
        metrics=("accuracy", "loss"),
        offers=frozenset({"classes", "labels", "features"}),
        check=_check_classes,
    )


@TASKS.register
def binary() -> Task:
    """Yes or no for each example: one logit (N, 1) or (N,), labels 0 and 1 (N,)."""
    return Task(
        loss=_binary_loss,
        divergence=soft_binary_cross_entropy,
        metrics=("accuracy", "loss"),
        offers=frozenset({"labels", "features"}),
        check=_check_binary,
        outputs=lambda target, classes: 1,
    )


@TASKS.register
def multilabel() -> Task:
    """Yes or no for each of L labels: logits (N, L), targets 0 and 1 (N, L).

    The loss is the mean of the L cross-entropies; the divergence is the sum of the L Bernoulli KL.
    """
    return Task(
        loss=_multilabel_loss,
        divergence=soft_binary_cross_entropy,
        metrics=("macro_f1", "loss"),
        offers=frozenset({"features"}),
        check=_check_multilabel,
        prepare=lambda target: map_tensors(_whole, target),
        outputs=lambda target, classes: count_of(target),
    )


def _binary_loss(output: Tensor, target: Tensor, share: Tensor) -> Tensor:
    return (binary_cross_entropy(output.reshape(target.shape), target) * share).sum()


def _multilabel_loss(output: Tensor, target: Tensor, share: Tensor) -> Tensor:
    return (by_example(binary_cross_entropy(output, target)).mean(-1) * share).sum()


def _whole(target: Tensor) -> Tensor:
    """Return targets as whole numbers if they are, so that metrics may count them."""
    return target.long() if bool((target == target.floor()).all()) else target


def _check_classes(x: Tree, output: Tensor, target: Tree) -> str:
    fits = output.dim() == 2 and isinstance(target, Tensor) and target.dim() == 1
    return "" if fits else "it needs logits (N, classes) and one class label for each example"


def _check_binary(x: Tree, output: Tensor, target: Tree) -> str:
    if not isinstance(target, Tensor) or target.dim() != 1 or output[0].numel() != 1:
        return "it needs one logit, (N, 1) or (N,), and one label for each example"
    return _check_zero_or_one(target)


def _check_multilabel(x: Tree, output: Tensor, target: Tree) -> str:
    if not isinstance(target, Tensor) or target.dim() != 2 or output.shape[1:] != target.shape[1:]:
        return "it needs a logit and a target for each label, both of shape (N, labels)"
    return _check_zero_or_one(target)


def _check_zero_or_one(target: Tensor) -> str:
    least, most = target.min().item(), target.max().item()
    fits = least >= 0 and most <= 1
    return "" if fits else f"its targets are 0 or 1, and these are in {least:g}..{most:g}"


CLASSIFICATION = classification()
