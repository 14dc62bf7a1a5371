"""Examples and data sets: inputs and targets, checked once, when they are made."""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from feddkd.data.batches import Indices
from feddkd.errors import InputError
from feddkd.trees import (
    Tree,
    first_tensor,
    kind_in_words,
    kind_of,
    map_tensors,
    named_tensors_of,
    tensors_of,
)

MOST_CLASSES = 100_000  # a larger label is a mistake, such as a pixel or an identity number
WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs and targets, and the domain of each example if the source has several."""

    # (N, C, H, W), unsigned bytes. A user's own examples: (N, ...), unsigned bytes, floating-point
    # numbers, or whole numbers that are tokens; or a tuple or a dict of such tensors
    x: Tree
    y: Tree  # class labels: (N,), int64. Other targets: int64 or floating point, of any shape
    domain: Tensor | None = None  # (N,), int64

    def __len__(self) -> int:
        return len(first_tensor(self.y))


@dataclass(frozen=True, eq=False)
class Data:
    """The training and test examples of a source."""

    name: str
    train: Examples
    test: Examples
    # of the labels. Where the targets are other whole numbers (the classes of pixels, tokens) it is
    # the number of their values, or 0 if that is not known; for other numbers it is 0
    classes: int
    labels: tuple[str, ...]
    scale: float  # the largest value of a pixel, which becomes 1
    domains: tuple[str, ...] = ()
    note: str = ""
    # in a packed copy: the positions of the training and test images that it holds
    held: tuple[Indices, Indices] | None = None

    @property
    def has_labels(self) -> bool:
        """The targets are class labels, one for each example."""
        y = self.train.y
        return self.classes > 0 and isinstance(y, Tensor) and y.ndim == 1

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes; none if the targets are not class labels."""
        return self.labels if self.has_labels else ()

    @functools.cached_property
    def digest(self) -> str:
        """The sha256 over every tensor's bytes, shape and type, and over the names in trees."""
        digest = hashlib.sha256()
        for part in (self.train, self.test):
            domain = {} if part.domain is None else {"": part.domain}
            named = named_tensors_of("", part.x).items(), named_tensors_of("", part.y).items()
            for name, tensor in (*named[0], *named[1], *domain.items()):
                digest.update(f"{name}{tuple(tensor.shape)} {tensor.dtype};".encode())
                digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


def examples(source: Any, class_labels: bool = True) -> Examples:
    """Return a user's examples, checked.

    They are given as a pair (x, y), or as a map-style data set whose items are such pairs. x is a
    tensor or an array, or a tuple or a dict of them; y is one of class labels, or with
    class_labels=False whatever the task takes.
    """
    if isinstance(source, Examples):
        return _checked(source.x, source.y, source.domain, class_labels)
    if _is_pair(source) and _holds_examples(source):
        x, y = _tree(source[0], "the examples"), _tree(source[1], "the labels")
        return _checked(x, y, None, class_labels)
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        raise InputError(
            "examples must be a pair (x, y) of tensors or arrays, or a map-style data set; not"
            f" {type(source).__name__}"
        )
    items = [_item(source[index], index) for index in range(len(source))]
    for side, what in enumerate(("examples", "targets")):
        kinds = {kind_in_words(map_tensors(lambda t: t[None], item[side])) for item in items}
        if len(kinds) != 1:
            raise InputError(
                f"the {what} of a data set must all have one shape, not {len(kinds)} shapes"
            )
    x, y = map_tensors(lambda *tensors: torch.stack(tensors), *items)
    return _checked(x, y, None, class_labels)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _holds_examples(source: Any) -> bool:
    """Return whether a pair holds arrays of examples: it is not a list of two examples."""
    if all(isinstance(part, Tensor | np.ndarray) for part in source):
        return True
    return isinstance(source, tuple) and all(map(_has_axes, source))


def _has_axes(value: Any) -> bool:
    """Return whether a value is a tree of arrays that have an axis for examples."""
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim > 0
    parts = value.values() if isinstance(value, Mapping) else value
    return (
        isinstance(value, Mapping | tuple | list) and len(value) > 0 and all(map(_has_axes, parts))
    )


def _item(item: Any, index: int) -> tuple[Tree, Tree]:
    if not _is_pair(item):
        raise InputError(f"item {index} of the data set is not a pair (example, label)")
    x, y = item
    if not isinstance(y, Tensor | Mapping) and not _has_axes(y):
        y = np.asarray(y)
    return _tree(x, f"the example of item {index}"), _tree(y, f"the label of item {index}")


def _tree(value: Any, what: str) -> Tree:
    """Return a value as a tree of tensors on the CPU."""
    if isinstance(value, Mapping) and value:
        return {str(key): _tree(part, f"{what}, {str(key)!r},") for key, part in value.items()}
    if isinstance(value, tuple | list) and _has_axes(value):
        return tuple(_tree(part, f"{what}, part {n},") for n, part in enumerate(value))
    return _tensor(value, what)


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


def _checked(x: Tree, y: Tree, domain: Tensor | None, class_labels: bool) -> Examples:
    if isinstance(x, Tensor):
        _check_one_input(x)
    count = len(first_tensor(x))
    for name, tensor in named_tensors_of("the examples", x).items():
        _check_numbers(name, tensor, count)
    if domain is not None:
        _check_whole("domains", domain, count)
        domain = domain.long()
    if class_labels:
        if not isinstance(y, Tensor):
            raise InputError(
                f"labels must be one tensor of shape ({count},), not {kind_in_words(y)}"
            )
        _check_whole("labels", y, count)
        return Examples(map_tensors(_long, x), y.long(), domain)
    for name, tensor in named_tensors_of("the targets", y).items():
        _check_numbers(name, tensor, count)
    return Examples(map_tensors(_long, x), map_tensors(_long_target, y), domain)


def _long(tensor: Tensor) -> Tensor:
    """Return tokens as int64, and other inputs unchanged."""
    return tensor.long() if tensor.dtype in WHOLE else tensor


def _long_target(tensor: Tensor) -> Tensor:
    """Return whole numbers and truth values as int64, and other targets unchanged."""
    return tensor if tensor.is_floating_point() else tensor.long()


def _check_one_input(x: Tensor) -> None:
    if x.ndim < 2 or 0 in x.shape:
        raise InputError(
            "examples must not be empty, and have a shape such as (N, features) or (N, C, H, W);"
            f" not {tuple(x.shape)}"
        )
    tokens = x.dtype in WHOLE and x.ndim == 2
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


def _check_numbers(name: str, tensor: Tensor, count: int) -> None:
    """Raise InputError if a tensor has not one entry for each example, or holds no numbers."""
    if tensor.ndim < 1 or len(tensor) != count:
        raise InputError(
            f"{count} examples need {name} of shape ({count}, ...), not {tuple(tensor.shape)}"
        )
    if tensor.is_complex() or 0 in tensor.shape:
        raise InputError(
            f"{name} must be real numbers, and not empty; they are {tensor.dtype} of shape"
            f" {tuple(tensor.shape)}"
        )
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        raise InputError(f"{name} hold NaN or infinite values")


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
    class_labels: bool = True,
) -> Data:
    """Return a user's data; `train` and `test` are given in any form that `examples` takes.

    If `scale` is not given, it is 255 for bytes and 1 for other numbers. With class_labels=False
    the targets are no class labels; `labels` then names the values that they take, if they are
    classes of pixels or tokens.
    """
    train, test = examples(train, class_labels), examples(test, class_labels)
    for what, one, other in (("examples", train.x, test.x), ("targets", train.y, test.y)):
        if kind_of(one) != kind_of(other):
            raise InputError(
                f"training and test {what} must be alike, not {kind_in_words(one)} and"
                f" {kind_in_words(other)}"
            )
    classes = 1 + int(max(train.y.max(), test.y.max())) if class_labels else len(labels)
    if labels and classes > len(labels):
        raise InputError(
            f"label {classes - 1} has no name; {len(labels)} are given, for 0..{len(labels) - 1}"
        )
    names = tuple(labels) or tuple(str(label) for label in range(classes))
    if scale is None:
        scale = 255.0 if any(t.dtype == torch.uint8 for t in tensors_of(train.x)) else 1.0
    return Data(name, train, test, len(names), names, scale, tuple(domains), note)
