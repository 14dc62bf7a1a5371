"""The value `Task`: a loss, the divergence that DKD minimises, and metrics.

All three are means over what counts: examples, or their pixels or tokens. `counted` says which
positions of a target count, and `shares` gives each its weight in a batch. So a loss never has to
know of padding, and positions that do not count have no influence on a mean.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from feddkd.errors import InputError, choices
from feddkd.spec.registry import Registry, Spelled
from feddkd.trees import Tree, first_tensor, kind_in_words, map_tensors

# What methods may need of a task:
# classes: one logit for each class, and one class label for each example
# labels: one class label for each example
# features: outputs (N, outputs), so that the last layer reads one vector for each example
Offer = Literal["classes", "labels", "features"]
OFFERS = {
    "classes": "a logit for each class and one class label for each example",
    "labels": "one class label for each example",
    "features": "one vector of features for each example",
}
IGNORED = -100  # the target of a position that does not count
LEAST = 1e-30  # below every share; a batch in which nothing counts has the loss 0

# (network's output, targets, shares) -> scalar
TaskLoss = Callable[[Tensor, Tree, Tensor], Tensor]
# (teacher's output, student's output, shares) -> scalar
TaskDivergence = Callable[[Tensor, Tensor, Tensor], Tensor]
# (all inputs, output of a few examples, all targets) -> what is wrong, or an empty text
Check = Callable[[Tree, Tensor, Tree], str]


def _nothing_wrong(x: Tree, output: Tensor, target: Tree) -> str:
    return ""


def _as_given(target: Tree) -> Tree:
    return target


def _as_many_as_classes(target: Tree, classes: int) -> int:
    return max(classes, 1)


@dataclass(frozen=True, eq=False)
class Task(Spelled):
    """A task: pure functions of outputs and targets, batch first, and metrics.

    The shares weigh the examples of a batch, or with `counted` their positions: they sum to one,
    and what does not count has the share 0. So sum(shares * loss of each) is a mean. The functions
    must be pure and must not branch on a tensor, because engines vmap, trace and record them.
    """

    loss: TaskLoss  # what local training minimises
    # what DKD minimises: least where teacher and student agree; the teacher is constant
    divergence: TaskDivergence
    metrics: Sequence[Any] = ("loss",)  # names or metrics, the headline first
    # (targets) -> True for each position that counts, (N, ...); None: every example counts once
    counted: Callable[[Tree], Tensor] | None = None
    offers: frozenset[Offer] = frozenset()  # what methods may need
    check: Check = _nothing_wrong
    prepare: Callable[[Tree], Tree] = _as_given  # (stored targets) -> the targets that are learned
    # (targets, number of classes) -> the number of outputs of a network that is built by its name
    outputs: Callable[[Tree, int], int] = _as_many_as_classes

    def __post_init__(self) -> None:
        for name in ("loss", "divergence"):
            if not callable(getattr(self, name)):
                raise InputError(f"a task's {name} must be a function, not {getattr(self, name)!r}")
        if isinstance(self.metrics, str) or not self.metrics:
            raise InputError(f'a task\'s metrics are a list, as in ["loss"], not {self.metrics!r}')
        object.__setattr__(self, "offers", frozenset(self.offers))
        if wrong := self.offers - set(get_args(Offer)):
            raise InputError(
                f"a task cannot offer {choices(map(str, wrong))}; it can: {choices(OFFERS)}"
            )

    @property
    def title(self) -> str:
        """The task's text in quotes, or words for a task that was made by hand."""
        return f"task {str(self)!r}" if self.calls else "your own task"

    def shares(self, target: Tree, share: Tensor) -> Tensor:
        """Return the weight of each position in the mean of a batch, from that of each example."""
        if self.counted is None:
            return share
        counted = self.counted(target)
        weights = share.reshape(-1, *(1,) * (counted.dim() - 1)) * counted
        return weights / weights.sum().clamp(min=LEAST)

    def units(self, target: Tree) -> Tensor | None:
        """Return the number of positions that count in each example; None: each counts once."""
        if self.counted is None:
            return None
        counted = self.counted(target)
        return counted.reshape(len(counted), -1).sum(1)

    def learned(self, target: Tree, dtype: torch.dtype) -> Tree:
        """Return stored targets as the loss takes them; `dtype` is that of the run."""
        return map_tensors(
            lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor,
            self.prepare(target),
        )

    def check_fit(self, x: Tree, output: Tensor, target: Tree) -> None:
        """Raise InputError if a network's output for the first examples does not fit the targets.

        `x` and `target` are of all examples, the targets as `learned` returns them.
        """
        problem = self.check(x, output, target) or self._problem(output, target)
        if problem:
            raise InputError(
                f"{self.title}: {problem}; an example's output has the shape"
                f" {tuple(output.shape[1:])}, its target {kind_in_words(target)}"
            )

    def _problem(self, output: Tensor, target: Tree) -> str:
        """Return what is wrong with the results of loss and divergence for a few examples."""
        few = map_tensors(lambda tensor: tensor[: len(output)], target)
        share = output.new_full((len(output),), 1 / len(output))
        for name in ("loss", "divergence"):
            try:
                shares = self.shares(few, share)
                given = (output, few) if name == "loss" else (output, output)
                value = getattr(self, name)(*given, shares)
            except Exception as error:
                return f"its {name} cannot be computed ({' '.join(str(error).split())})"
            if not isinstance(value, Tensor) or value.dim() or not value.is_floating_point():
                found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                return f"its {name} must be one floating-point number, not {found}"
        return ""


def check_offers(task: Task, needed: frozenset[Offer], method: str) -> None:
    """Raise InputError if a method needs what a task does not offer."""
    for offer in sorted(needed - task.offers):
        raise InputError(
            f"{method} needs {OFFERS[offer]}, and {task.title} does not have that; fedavg, fedprox,"
            " scaffold and dkd work with every task"
        )


TASKS: Registry[Task] = Registry("task", "feddkd.tasks")


def count_of(target: Tree) -> int:
    """Return the number of targets of an example, 1 for targets of shape (N,)."""
    return first_tensor(target)[0].numel()
