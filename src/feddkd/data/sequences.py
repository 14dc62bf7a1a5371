"""Sequences of different lengths, padded to one length, with a mask.

Inputs become {"sequence": ..., "mask": ...}, where the mask is True at the positions of the
sequence. Several sequences of an example keep their names, and a mask that is among them, such as
"attention_mask", serves for all. Targets are padded with -100, which the task `language` does not
count. All examples of a run have one length, that of the longest, because they lie in one tensor.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from feddkd.errors import InputError
from feddkd.tasks.task import IGNORED
from feddkd.trees import Tree


def mask_of(tree: Tree) -> Tensor | None:
    """Return the mask (N, length) among inputs that are a dict, if there is one."""
    parts = tree if isinstance(tree, Mapping) else {}
    masks = [part for name, part in parts.items() if name.endswith("mask")]
    return next((mask for mask in masks if isinstance(mask, Tensor) and mask.ndim == 2), None)


def differ_in_length(trees: Sequence[Tree] | Tensor) -> bool:
    """Return whether trees are single tensors that differ in their first axis alone."""
    if isinstance(trees, Tensor) or not all(
        isinstance(tree, Tensor) and tree.ndim in (1, 2) for tree in trees
    ):
        return False
    lengths = {len(tree) for tree in trees}
    return len(lengths) > 1 and len({(tree.shape[1:], tree.dtype) for tree in trees}) == 1


def padded(columns: Mapping[str, Sequence[Tensor] | Tensor]) -> dict[str, Tensor]:
    """Return each column as one tensor, with zeros after short sequences, and with a mask."""
    ragged = {name: column for name, column in columns.items() if differ_in_length(column)}
    counts = {tuple(map(len, column)) for column in ragged.values()}
    whole = {name: filled(column, 0) for name, column in columns.items()}
    if not ragged or mask_of(whole) is not None:
        return whole
    if len(counts) > 1:
        raise InputError(
            f"the sequences {', '.join(ragged)} of an example differ in length: give them a mask"
            ' whose name ends in "mask"'
        )
    lengths = torch.tensor(counts.pop())
    longest = int(lengths.max())
    return {**whole, "mask": torch.arange(longest) < lengths[:, None]}


def filled(sequences: Sequence[Tensor] | Tensor, filler: int) -> Tensor:
    """Return sequences as one tensor, with the filler after short ones."""
    if not differ_in_length(sequences):
        return sequences if isinstance(sequences, Tensor) else torch.stack([*sequences])
    longest = max(map(len, sequences))
    return torch.stack([_longer(one, 0, longest, filler) for one in sequences])


def of_one_length(parts: Sequence[Tree]) -> list[Tree]:
    """Return the inputs of parts of a data set, such as its clients, with masks and one length.

    Of several tensors those are sequences that are as long as the mask in every part.
    """
    named = [_named(part) for part in parts]
    if len({frozenset(part) - {"mask"} for part in named}) > 1:
        return list(parts)  # they are not alike: another check raises the error
    masked = [(part, mask) for part in named if (mask := mask_of(part)) is not None]
    names = [
        name for name in masked[0][0] if all(_begins_as(part[name], mask) for part, mask in masked)
    ]
    whole = [_with_mask(part, names) for part in named]
    longest = max(part[name].shape[1] for part in whole for name in names)
    return [
        {n: _longer(t, 1, longest, 0) if n in names else t for n, t in part.items()}
        for part in whole
    ]


def targets_of_one_length(parts: Sequence[Tree]) -> list[Tree]:
    """Return the targets of parts of a data set, rows of whole numbers padded to one length."""
    if not all(isinstance(y, Tensor) and y.ndim == 2 and y.dtype == torch.int64 for y in parts):
        return list(parts)
    longest = max(part.shape[1] for part in parts)
    return [_longer(part, 1, longest, IGNORED) for part in parts]


def _named(part: Tree) -> dict[str, Tree]:
    """Return inputs as a dict; one tensor is a sequence of each example."""
    if isinstance(part, Mapping):
        return dict(part)
    if not isinstance(part, Tensor) or part.ndim < 2:
        raise InputError("some examples are sequences of different lengths, and others are not")
    return {"sequence": part}


def _begins_as(part: Tree, mask: Tensor) -> bool:
    """Return whether a tensor has the shape of a mask, or this shape and more axes."""
    return isinstance(part, Tensor) and part.shape[:2] == mask.shape


def _with_mask(part: dict[str, Tree], names: Sequence[str]) -> dict[str, Tree]:
    """Return inputs with a mask; without one their sequences have equal lengths."""
    if mask_of(part) is not None:
        return part
    first = next(part[name] for name in names if name in part)
    return {**part, "mask": torch.ones(first.shape[:2], dtype=torch.bool)}


def _longer(tensor: Tensor, axis: int, length: int, filler: int) -> Tensor:
    """Return a tensor with this length of an axis, with the filler behind its numbers."""
    after = (tensor.ndim - 1 - axis) * 2
    return pad(tensor, (0,) * (after + 1) + (length - tensor.shape[axis],), value=filler)
