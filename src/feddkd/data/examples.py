"""Examples and data sets: tensors and labels, checked once, when they are made."""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from feddkd.data.batches import Indices
from feddkd.errors import InputError

MOST_CLASSES = 100_000  # a larger label is a mistake, such as a pixel or an identity number


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples and their labels, and the domain of each example if the source has several."""

    # (N, C, H, W), unsigned bytes. A user's own examples: (N, ...), unsigned bytes, floating-point
    # numbers, or whole numbers that are tokens
    x: Tensor
    y: Tensor  # (N,), int64
    domain: Tensor | None = None  # (N,), int64

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True, eq=False)
class Data:
    """The training and test examples of a source."""

    name: str
    train: Examples
    test: Examples
    classes: int
    labels: tuple[str, ...]
    scale: float  # the largest value of a pixel, which becomes 1
    domains: tuple[str, ...] = ()
    note: str = ""
    # in a packed copy: the positions of the training and test images that it holds
    held: tuple[Indices, Indices] | None = None

    @functools.cached_property
    def digest(self) -> str:
        """The sha256 over every tensor's bytes, shape and type."""
        digest = hashlib.sha256()
        for part in (self.train, self.test):
            for tensor in (part.x, part.y, *([] if part.domain is None else [part.domain])):
                digest.update(f"{tuple(tensor.shape)} {tensor.dtype};".encode())
                digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


def examples(source: Any) -> Examples:
    """Return a user's examples, checked.

    They are given as a pair (x, y) of tensors or arrays, or as a map-style data set whose items are
    such pairs.
    """
    if isinstance(source, Examples):
        return _checked(source.x, source.y, source.domain)
    if _is_pair(source) and all(isinstance(part, Tensor | np.ndarray) for part in source):
        return _checked(_tensor(source[0], "the examples"), _tensor(source[1], "the labels"))
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        raise InputError(
            "examples must be a pair (x, y) of tensors or arrays, or a map-style data set; not"
            f" {type(source).__name__}"
        )
    items = [_item(source[index], index) for index in range(len(source))]
    shapes = {x.shape for x, _ in items}
    if len(shapes) != 1:
        raise InputError(
            f"the examples of a data set must all have one shape, not {len(shapes)} shapes"
        )
    return _checked(torch.stack([x for x, _ in items]), torch.stack([y for _, y in items]))


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _item(item: Any, index: int) -> tuple[Tensor, Tensor]:
    if not _is_pair(item):
        raise InputError(f"item {index} of the data set is not a pair (example, label)")
    label = item[1] if isinstance(item[1], Tensor) else np.asarray(item[1])
    x = _tensor(item[0], f"the example of item {index}")
    return x, _tensor(label, f"the label of item {index}")


def _tensor(value: Any, what: str) -> Tensor:
    """Return a value as a tensor on the CPU, of a type that torch knows.

    Arrays are copied, because they may be read-only or in another byte order.
    """
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
        kind = type(value).__name__
        if isinstance(value, np.ndarray):
            kind = f"an array of {value.dtype}"
        raise InputError(f"{what} must be a tensor or an array of numbers, not {kind}")
    if value.dtype.itemsize > 8 or (value.dtype.kind == "u" and value.dtype.itemsize > 1):
        value = value.astype(np.float64 if value.dtype.kind == "f" else np.int64)
    return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C"))


def _checked(x: Tensor, y: Tensor, domain: Tensor | None = None) -> Examples:
    if x.ndim < 2 or 0 in x.shape:
        raise InputError(
            "examples must not be empty, and have a shape such as (N, features) or (N, C, H, W);"
            f" not {tuple(x.shape)}"
        )
    tokens = x.dtype in (torch.int8, torch.int16, torch.int32, torch.int64) and x.ndim == 2
    if x.dtype != torch.uint8 and not x.is_floating_point() and not tokens:
        raise InputError(
            f"examples must be uint8 or floating point, not {x.dtype}; other whole numbers are"
            " tokens, of shape (N, length)"
        )
    if x.dtype == torch.uint8 and x.ndim == 4 and x.shape[1] > 4 >= x.shape[3]:
        raise InputError(
            f"images must have the shape (N, C, H, W), with the channels first; {tuple(x.shape)}"
            " looks as if the channels came last"
        )
    if x.is_floating_point() and not bool(x.isfinite().all()):
        raise InputError("the examples hold NaN or infinite values")
    for name, values in (("labels", y), ("domains", y if domain is None else domain)):
        _check_whole(name, values, len(x))
    return Examples(x.long() if tokens else x, y.long(), None if domain is None else domain.long())


def _check_whole(name: str, values: Tensor, count: int) -> None:
    if values.shape != (count,):
        raise InputError(
            f"{count} examples need {name} of shape ({count},), not {tuple(values.shape)}"
        )
    if (
        values.dtype == torch.bool
        or values.is_complex()
        or not bool((values.double() == values.double().floor()).all())
    ):
        raise InputError(
            f"{name} must be whole numbers, not {values.dtype} such as {values[0].item()}"
        )
    least, most = values.double().min().item(), values.double().max().item()
    if least < 0 or most >= MOST_CLASSES:
        raise InputError(
            f"{name} must be in 0..{MOST_CLASSES - 1}; these are in {least:g}..{most:g}"
        )


def from_arrays(
    train: Any,
    test: Any,
    *,
    name: str = "arrays",
    labels: Sequence[str] = (),
    scale: float | None = None,
    domains: Sequence[str] = (),
    note: str = "",
) -> Data:
    """Return a user's data; `train` and `test` are given in any form that `examples` takes.

    If `scale` is not given, it is 255 for bytes and 1 for other numbers.
    """
    train, test = examples(train), examples(test)
    if train.x.shape[1:] != test.x.shape[1:] or train.x.dtype != test.x.dtype:
        kinds = [f"{part.x.dtype} {tuple(part.x.shape[1:])}" for part in (train, test)]
        raise InputError(f"training and test examples must be alike, not {kinds[0]} and {kinds[1]}")
    classes = 1 + int(max(train.y.max(), test.y.max()))
    if labels and classes > len(labels):
        raise InputError(
            f"label {classes - 1} has no name; {len(labels)} are given, for 0..{len(labels) - 1}"
        )
    names = tuple(labels) or tuple(str(label) for label in range(classes))
    if scale is None:
        scale = 255.0 if train.x.dtype == torch.uint8 else 1.0
    return Data(name, train, test, len(names), names, scale, tuple(domains), note)
