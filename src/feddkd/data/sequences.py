"""Sequences of different lengths, padded to one length, with a mask.

Inputs become {"sequence": ..., "mask": ...}, where the mask is True at the positions of the
sequence. Targets are padded with -100, which the task `language` does not count. All examples of a
run have one length, that of the longest, because they lie in one tensor.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from feddkd.errors import InputError
from feddkd.tasks.task import IGNORED
from feddkd.trees import Tree, map_tensors

KEYS = {"sequence", "mask"}


def is_padded(tree: Tree) -> bool:
    """Return whether inputs are padded sequences with a mask."""
    return isinstance(tree, dict) and set(tree) == KEYS


def differ_in_length(trees: Sequence[Tree]) -> bool:
    """Return whether trees are single tensors that differ in their first axis alone."""
    if not all(isinstance(tree, Tensor) and tree.ndim in (1, 2) for tree in trees):
        return False
    lengths = {len(tree) for tree in trees}
    return len(lengths) > 1 and len({(tree.shape[1:], tree.dtype) for tree in trees}) == 1


def padded(sequences: Sequence[Tensor], target: bool = False) -> Tree:
    """Return sequences as one padded tensor: inputs with their mask, targets without."""
    longest = max(map(len, sequences))
    if target:
        return torch.stack([_filled(one, longest, IGNORED) for one in sequences])
    lengths = torch.tensor([len(one) for one in sequences])
    return {
        "sequence": torch.stack([_filled(one, longest) for one in sequences]),
        "mask": torch.arange(longest) < lengths[:, None],
    }


def of_one_length(parts: Sequence[Tree]) -> list[Tree]:
    """Return the inputs of parts of a data set, such as its clients, with masks and one length."""
    masked = [_with_mask(part) for part in parts]
    longest = max(part["mask"].shape[1] for part in masked)
    return [map_tensors(lambda t: _padded_axis(t, 1, longest, 0), part) for part in masked]


def targets_of_one_length(parts: Sequence[Tree]) -> list[Tree]:
    """Return the targets of parts of a data set, rows of whole numbers padded to one length."""
    if not all(isinstance(y, Tensor) and y.ndim == 2 and y.dtype == torch.int64 for y in parts):
        return list(parts)
    longest = max(part.shape[1] for part in parts)
    return [_padded_axis(part, 1, longest, IGNORED) for part in parts]


def _with_mask(part: Tree) -> Tree:
    if is_padded(part):
        return part
    if not isinstance(part, Tensor) or part.ndim < 2:
        raise InputError("some examples are sequences of different lengths, and others are not")
    return {"sequence": part, "mask": torch.ones(part.shape[:2], dtype=torch.bool)}


def _filled(one: Tensor, length: int, filler: int = 0) -> Tensor:
    return _padded_axis(one, 0, length, filler)


def _padded_axis(tensor: Tensor, axis: int, length: int, filler: int) -> Tensor:
    after = (tensor.ndim - 1 - axis) * 2
    return pad(tensor, (0,) * (after + 1) + (length - tensor.shape[axis],), value=filler)
