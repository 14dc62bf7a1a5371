"""Several versions of each example, for data sets with random transforms.

All versions lie in the store, on a second axis: (N, versions, ...). The transform step `version()`
takes one of them by the key of the step, so all engines read the same one.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from feddkd.data.conversion import in_words, is_data_set
from feddkd.data.examples import Examples, examples
from feddkd.errors import InputError
from feddkd.randomness import Key, fold
from feddkd.spec.types import Count, Whole, checked
from feddkd.trees import are_equal


def redrawn(data_set: Any, versions: int = 8, *, seed: int = 0) -> Examples:
    """Return the examples of a data set whose `__getitem__` is random, in several versions.

    `__getitem__` is called `versions` times for each item, before the run; each time Python's,
    numpy's and torch's generators are seeded from `seed`, the version and the item. In training a
    client reads a version at random, each time that it reads the example; so nothing is read twice
    alike for sure only if there are many versions. In tests the first version is read. The memory
    for the examples is `versions` times as large. Give the data sets of clients different seeds.
    """
    versions, seed = checked(versions, Count, "versions"), checked(seed, Whole, "seed")
    if not is_data_set(data_set):
        raise InputError(f"redrawn takes a map-style data set, not {in_words(data_set)}")
    drawn = [examples(_Seeded(data_set, ("version", seed, n)), False) for n in range(versions)]
    if not all(are_equal(other.y, drawn[0].y) for other in drawn):
        raise InputError("the targets of a data set must be the same in all its versions")
    if not all(isinstance(one.x, Tensor) for one in drawn):
        raise InputError("redrawn takes data sets whose examples are one tensor each")
    return Examples(torch.stack([one.x for one in drawn], 1), drawn[0].y, versions=versions)


def with_versions(parts: Sequence[Examples]) -> tuple[list[Examples], str]:
    """Return parts of a data set in as many versions, and the transform that takes one of them."""
    most = max((part.versions for part in parts), default=0)
    if not most:
        return list(parts), ""
    if any(part.versions not in (0, 1, most) for part in parts):
        raise InputError("all redrawn data sets must have equally many versions")
    return [part if part.versions == most else _repeated(part, most) for part in parts], "version()"


def _repeated(part: Examples, versions: int) -> Examples:
    """Return examples with equal versions."""
    if not isinstance(part.x, Tensor):
        raise InputError("some clients' examples are redrawn, and others are not one tensor each")
    x = part.x if part.versions else part.x[:, None]
    return replace(part, x=x.expand(-1, versions, *x.shape[2:]), versions=versions)


class _Seeded:
    """A data set whose items are read under a seed."""

    def __init__(self, data_set: Any, key: Key) -> None:
        self.data_set, self.key = data_set, key

    def __len__(self) -> int:
        return len(self.data_set)

    def __getitem__(self, index: int) -> Any:
        with _seeded((*self.key, index)):
            return self.data_set[index]


@contextmanager
def _seeded(key: Key) -> Iterator[None]:
    """Seed Python's, numpy's and torch's generators by a key, and restore them at the end."""
    number = fold(key)
    python, array = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)
