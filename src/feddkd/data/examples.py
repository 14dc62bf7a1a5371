"""Examples and data sets: inputs and targets, checked once, when they are made."""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from feddkd.data.batches import Indices
from feddkd.data.conversion import (
    has_axes,
    in_words,
    is_data_set,
    is_pair,
    item_of,
    stacked,
    tree_of,
)
from feddkd.data.sequences import mask_of, of_one_length, targets_of_one_length
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
Words = npt.NDArray[np.str_]
WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs and targets, and the domain of each example if the source has several."""

    # (N, C, H, W), unsigned bytes. A user's own examples: (N, ...), unsigned bytes, floating-point
    # numbers, or whole numbers that are tokens; or a tuple or a dict of such tensors
    x: Tree
    y: Tree  # class labels: (N,), int64. Other targets: int64 or floating point, of any shape
    domain: Tensor | None = None  # (N,), int64
    versions: int = 0  # of each example, along the second axis of x; 0: it has no such axis
    # the name of the group of each example, (N,): metrics are also those of each group of tests
    group: Words | None = None

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

    def __repr__(self) -> str:
        return f"<data {self.name!r}: {len(self.train)} training, {len(self.test)} test examples>"

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
            if part.group is not None:
                digest.update(repr(part.group.tolist()).encode())
        return digest.hexdigest()


def examples(source: Any, class_labels: bool | None = True) -> Examples:
    """Return a user's examples, checked.

    They are given as a pair (x, y), or as a map-style data set whose items are such pairs. x is a
    tensor or an array, or a tuple or a dict of them; y is one of class labels, or with
    class_labels=False whatever the task takes. With None y decides: one whole number for each
    example is a class label.
    """
    if isinstance(source, Examples):
        read = _checked(source.x, source.y, source.domain, class_labels)
        if source.group is not None and source.group.shape != (len(read),):
            raise InputError(f"{len(read)} examples need {len(read)} groups: {source.group.shape}")
        return replace(read, versions=source.versions, group=source.group)
    if is_pair(source) and _holds_examples(source):
        x, y = tree_of(source[0], "the examples"), tree_of(source[1], "the labels")
        return _checked(x, y, None, class_labels)
    _check_pair(source)
    if not is_data_set(source):
        raise InputError(
            "examples must be a pair (x, y) of tensors or arrays, or a map-style data set; not"
            f" {in_words(source)}"
        )
    x, y = stacked([item_of(source[index], index) for index in range(len(source))])
    return _checked(x, y, None, class_labels)


def _check_pair(source: Any) -> None:
    """Raise InputError, which says how to pass them, if examples are near a pair (x, y)."""
    if isinstance(source, Tensor | np.ndarray):
        raise InputError("labels are missing: give a pair (x, y), and not one tensor or array")
    if not isinstance(source, tuple) or not source:
        return
    numbers = is_pair(source) and all(isinstance(part, int | float | str) for part in source[1])
    if is_pair(source[0]) and not numbers:  # a data set of pairs
        return
    if len(source) != 2:
        raise InputError(f"examples are a pair (x, y), and this is a tuple of {len(source)}")
    kinds = " and ".join(type(part).__name__ for part in source)
    raise InputError(
        f"the pair (x, y) must be of tensors or arrays, not {kinds}: give"
        " (numpy.array(x), numpy.array(y))"
    )


def _holds_examples(source: Any) -> bool:
    """Return whether a pair holds arrays of examples: it is not a list of two examples."""
    if all(isinstance(part, Tensor | np.ndarray) for part in source):
        return True
    return isinstance(source, tuple) and all(map(has_axes, source))


def alike(parts: Sequence[Examples]) -> list[Examples]:
    """Return parts of a data set in one form: padded sequences get one length and a mask."""
    if all(mask_of(part.x) is None for part in parts):
        return list(parts)
    xs = of_one_length([part.x for part in parts])
    ys = targets_of_one_length([part.y for part in parts])
    return [replace(part, x=x, y=y) for part, x, y in zip(parts, xs, ys, strict=True)]


def _are_labels(y: Tree) -> bool:
    """Return whether targets are meant as class labels: one whole number for each example."""
    if not isinstance(y, Tensor) or y.ndim != 1:
        return False
    return not y.is_floating_point() or bool(((y >= 0) & (y == y.floor())).all())


def _checked(x: Tree, y: Tree, domain: Tensor | None, class_labels: bool | None) -> Examples:
    class_labels = _are_labels(y) if class_labels is None else class_labels
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
        y = y.squeeze(1) if y.shape[1:] == (1,) else y
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
    if x.dtype in WHOLE and x.ndim == 4:
        raise InputError(
            f"images must be uint8 or floating point, not {x.dtype}; other whole numbers are tokens"
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
        one_hot = values.ndim == 2 and len(values) == count and bool((values.sum(1) == 1).all())
        hint = "; one-hot rows become labels by y.argmax(1)" if one_hot else ""
        raise InputError(
            f"{count} examples need {name} of shape ({count},), not {tuple(values.shape)}{hint}"
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
    class_labels: bool | None = True,
) -> Data:
    """Return a user's data; `train` and `test` are given in any form that `examples` takes.

    If `scale` is not given, it is 255 for bytes and 1 for other numbers. With class_labels=False
    the targets are no class labels; `labels` then names the values that they take, if they are
    classes of pixels or tokens. With None the targets decide, as in `examples`.
    """
    train, test = alike([examples(train, class_labels), examples(test, class_labels)])
    if class_labels is None:
        class_labels = _are_labels(train.y) and _are_labels(test.y)
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
