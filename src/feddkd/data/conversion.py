"""Conversion of users' data to trees of tensors: arrays, images, items of data sets, sequences."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from feddkd.data.sequences import differ_in_length, filled, padded
from feddkd.errors import InputError
from feddkd.tasks.task import IGNORED
from feddkd.trees import Tree, kind_in_words, map_tensors

# the types of numbers of which an array and a tensor can share the memory
PLAIN = tuple(np.dtype(kind) for kind in ("f4", "f8", "u1", "i4", "i8", "?"))
TABLES = ("DataFrame", "Dataset", "DatasetDict", "Table", "LazyFrame")  # of other packages


def is_pair(value: Any) -> bool:
    """Return whether a value is a tuple or a list of two parts."""
    return isinstance(value, tuple | list) and len(value) == 2


def is_data_set(value: Any) -> bool:
    """Return whether a value has items by number."""
    readable = hasattr(value, "__getitem__") and hasattr(value, "__len__")
    return readable and not isinstance(value, str | bytes | Mapping) and not is_table(value)


def is_table(value: Any) -> bool:
    """Return whether a value is a table of another package, such as a DataFrame."""
    kind = type(value)
    package = kind.__module__.split(".")[0]
    return kind.__name__ in TABLES and package in ("pandas", "polars", "datasets", "pyarrow")


def in_words(value: Any) -> str:
    """Return what a wrong value is, and how to pass it if it is a known kind."""
    kind = type(value).__name__
    if is_table(value):
        return f"{kind}: give its columns to feddkd.from_table(table, x=..., y=..., owner=...)"
    if kind == "DataLoader":
        return f"{kind}: give its data set, loader.dataset; batches are made here"
    if isinstance(value, Mapping):
        keys = ", ".join(map(repr, list(value)[:5]))
        return f"{kind} with the keys {keys}: give the pair (x, y); x may be a dict of tensors"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return kind


def has_axes(value: Any) -> bool:
    """Return whether a value is a tree of arrays that have an axis for examples."""
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim > 0
    parts = value.values() if isinstance(value, Mapping) else value
    return (
        isinstance(value, Mapping | tuple | list) and len(value) > 0 and all(map(has_axes, parts))
    )


def item_of(item: Any, index: int) -> tuple[Tree, Tree]:
    """Return an item of a data set as a pair of trees."""
    if not is_pair(item):
        raise InputError(
            f"item {index} of the data set is not a pair (example, label) but {in_words(item)}"
        )
    x, y = item
    if not isinstance(y, Tensor | Mapping) and not has_axes(y):
        y = np.asarray(y)
    return tree_of(x, f"the example of item {index}"), tree_of(y, f"the label of item {index}")


def stacked(items: Sequence[tuple[Tree, Tree]]) -> tuple[Tree, Tree]:
    """Return the items of a data set as one tree of examples and one of targets.

    Sequences of different lengths are padded: see sequences.py.
    """
    if not items:
        raise InputError("the data set is empty: it has no items")
    sides = [_stack([item[side] for item in items], side) for side in (0, 1)]
    return sides[0], sides[1]


def _stack(trees: Sequence[Tree], side: int) -> Tree:
    if differ_in_length(trees):
        return filled(trees, IGNORED) if side == 1 else padded({"sequence": trees})
    if side == 0 and (columns := _ragged_columns(trees)):
        return padded(columns)
    kinds = {kind_in_words(map_tensors(lambda t: t[None], tree)) for tree in trees}
    if len(kinds) != 1:
        raise InputError(
            f"the {('examples', 'targets')[side]} of a data set must all have one shape, not"
            f" {len(kinds)} shapes"
        )
    return map_tensors(lambda *tensors: torch.stack(tensors), *trees)


def _ragged_columns(trees: Sequence[Tree]) -> dict[str, list[Tensor]] | None:
    """Return the tensors of dicts by their names, if they differ only in the lengths of some."""
    if not all(isinstance(tree, Mapping) and set(tree) == set(trees[0]) for tree in trees):
        return None
    columns = {name: [tree[name] for tree in trees] for name in trees[0]}
    if not any(map(differ_in_length, columns.values())):
        return None
    others = [column for column in columns.values() if not differ_in_length(column)]
    one_kind = all(len({kind_in_words(t[None]) for t in column}) == 1 for column in others)
    return columns if one_kind else None


def joined(pairs: Sequence[Any]) -> tuple[Any, Any] | None:
    """Return pairs (x, y) of arrays as one pair; None if they are not all of one kind."""
    kinds = {_kind_of_pair(pair) for pair in pairs}
    if len(kinds) != 1 or None in kinds:
        return None
    x, y = (_joined([pair[side] for pair in pairs]) for side in (0, 1))
    return x, y


def _kind_of_pair(pair: Any) -> tuple[Any, ...] | None:
    """Return the type of the numbers of a pair and the shape of one example; None: no arrays."""
    if type(pair) is not tuple or len(pair) != 2 or type(pair[0]) is not type(pair[1]):
        return None
    x, y = pair
    if type(x) is not np.ndarray and not (type(x) is Tensor and _is_plain(x) and _is_plain(y)):
        return None
    if not x.ndim or not y.ndim or not len(x) == len(y) > 0:
        return None
    return type(x), x.dtype, x.shape[1:], y.dtype, y.shape[1:]


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.layout == torch.strided


def _joined(parts: Sequence[Any]) -> Any:
    """Return arrays one after the other, as a tensor where torch knows the type of the numbers."""
    if isinstance(parts[0], Tensor):
        return torch.cat([part.detach() for part in parts])
    whole = np.concatenate(parts)
    return torch.from_numpy(whole) if whole.dtype in PLAIN else whole


def tree_of(value: Any, what: str) -> Tree:
    """Return a value as a tree of tensors on the CPU."""
    if isinstance(value, Mapping) and value:
        return {str(key): tree_of(part, f"{what}, {str(key)!r},") for key, part in value.items()}
    if isinstance(value, tuple | list) and has_axes(value):
        return tuple(tree_of(part, f"{what}, part {n},") for n, part in enumerate(value))
    return tensor_of(value, what)


def tensor_of(value: Any, what: str) -> Tensor:
    """Return a value as a tensor on the CPU, of a type that torch knows.

    Arrays are copied, because they may be read-only or in another byte order. A picture of PIL
    becomes bytes of shape (channels, height, width).
    """
    if isinstance(value, Tensor):
        if value.is_meta or value.layout != torch.strided:
            kind = "on the meta device" if value.is_meta else f"of layout {value.layout}"
            raise InputError(f"{what} must be a dense tensor with numbers; it is {kind}")
        return value.detach().cpu()
    if hasattr(value, "getbands"):
        pixels = np.atleast_3d(np.asarray(value))
        return torch.from_numpy(np.array(pixels.transpose(2, 0, 1), order="C"))
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
        raise InputError(
            f"{what} must be a tensor or an array of numbers, not {_array_in_words(value)}"
        )
    if value.dtype.itemsize > 8 or (value.dtype.kind == "u" and value.dtype.itemsize > 1):
        value = value.astype(np.float64 if value.dtype.kind == "f" else np.int64)
    return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C"))


def _array_in_words(value: Any) -> str:
    if not isinstance(value, np.ndarray):
        return type(value).__name__
    words = f"an array of {value.dtype}"
    if value.dtype.kind in "US" or (value.dtype.kind == "O" and isinstance(value.flat[0], str)):
        words += "; feddkd.from_table(...) numbers labels that are texts"
    return words
