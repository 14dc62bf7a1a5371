"""Tasks with a class for each position of an example: pixels and tokens.

A position that is ignored does not count, neither in a batch nor in the weight of a client.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from feddkd.spec.types import Whole
from feddkd.tasks.formulas import position_cross_entropy, soft_cross_entropy
from feddkd.tasks.task import IGNORED, TASKS, Task
from feddkd.trees import Tree, map_tensors, tensors_of


@TASKS.register
def segmentation(*, ignored: Whole | None = 255) -> Task:
    """A class for each pixel: logits (N, C, H, W), targets (N, H, W); a target `ignored` is none.

    Loss and divergence are means over the pixels that count.
    """
    return Task(
        loss=lambda output, target, share: position_cross_entropy(
            output.movedim(1, -1), target, share
        ),
        divergence=lambda teacher, student, share: soft_cross_entropy(
            teacher.movedim(1, -1), student.movedim(1, -1), share
        ),
        metrics=("iou", "pixel_accuracy", "loss"),
        counted=_is_counted,
        check=lambda x, output, target: _check(
            output.movedim(1, -1) if output.dim() > 2 else output, target, "pixel, (N, C, H, W)"
        ),
        prepare=_marker(ignored),
        outputs=_number_of_classes,
    )


@TASKS.register
def language(*, padding: Whole | None = None) -> Task:
    """The next token: logits (N, T, V), targets (N, T); means over tokens.

    The targets are those of the data: target t is the token that follows input t, so from rows of
    tokens x = rows[:, :-1] and y = rows[:, 1:]. Targets that are the inputs themselves are refused.
    A target -100 does not count, and no target `padding`.
    """
    return Task(
        loss=position_cross_entropy,
        divergence=soft_cross_entropy,
        metrics=("perplexity", "token_accuracy", "loss"),
        counted=_is_counted,
        check=_check_tokens,
        prepare=_marker(padding),
        outputs=_number_of_classes,
    )


def _is_counted(target: Tensor) -> Tensor:
    return target != IGNORED


def _marker(ignored: int | None) -> Callable[[Tree], Tree]:
    """Return a function that marks the targets of this value as ignored."""
    if ignored is None:
        return lambda target: target
    return lambda target: map_tensors(
        lambda tensor: torch.where(tensor == ignored, IGNORED, tensor), target
    )


def _number_of_classes(target: Tree, classes: int) -> int:
    return classes or int(target.max()) + 1


def _check_tokens(x: Tree, output: Tensor, target: Tree) -> str:
    if problem := _check(output, target, "token, (N, T, V)"):
        return problem
    counted = target != IGNORED
    for tokens in tensors_of(x):
        if tokens.shape == target.shape and bool((tokens == target)[counted].all()):
            return (
                "its targets are the inputs themselves, and it learns the next token: from rows of"
                " tokens give x = rows[:, :-1] and y = rows[:, 1:]"
            )
    return ""


def _check(logits: Tensor, target: Tree, place: str) -> str:
    """Return what is wrong with logits whose last axis is that of the classes."""
    if (
        not isinstance(target, Tensor)
        or target.is_floating_point()
        or logits.shape[1:-1] != target.shape[1:]
        or target.dim() < 2
    ):
        return f"it needs logits for each {place}, and a whole number as target of each"
    counted = target[target != IGNORED]
    if not len(counted):
        return "none of its targets counts"
    least, most = int(counted.min()), int(counted.max())
    if least < 0 or most >= logits.shape[-1]:
        return f"its targets are in {least}..{most}, and there are {logits.shape[-1]} logits"
    return ""
