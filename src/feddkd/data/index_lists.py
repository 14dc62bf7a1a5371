"""`IndexLists`: the positions that each client holds, as one array with offsets.

A million clients are two arrays in this form. It reads like a tuple of arrays.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np

from feddkd.data.batches import Indices


class IndexLists(Sequence[Indices]):
    """Lists of positions: list k is `values[offsets[k] : offsets[k + 1]]`."""

    def __init__(self, values: Indices, sizes: Sequence[int] | Indices) -> None:
        """Cut an array into lists of these sizes, which add up to its length."""
        self.values = np.asarray(values, np.int64)
        self.sizes = np.asarray(sizes, np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(self.sizes)])
        if self.offsets[-1] != len(self.values):
            raise ValueError(f"{len(self.values)} positions are not {self.offsets[-1]}")

    @classmethod
    def of(cls, lists: Iterable[Indices]) -> "IndexLists":
        """Return lists in this form."""
        if isinstance(lists, IndexLists):
            return lists
        arrays = [np.asarray(one, np.int64) for one in lists]
        return cls(np.concatenate([np.arange(0), *arrays]), [len(one) for one in arrays])

    @classmethod
    def grouped(cls, values: Indices, owners: Indices, count: int) -> "IndexLists":
        """Return `count` lists; `owners` has the list of each value, and their order is kept."""
        order = np.argsort(owners, kind="stable")
        return cls(values[order], np.bincount(owners, minlength=count))

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, at: int) -> Indices: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Indices, ...]: ...
    def __getitem__(self, at: int | slice) -> Indices | tuple[Indices, ...]:
        if isinstance(at, slice):
            return tuple(self[k] for k in range(len(self))[at])
        k = range(len(self))[at]
        return self.values[self.offsets[k] : self.offsets[k + 1]]

    def __iter__(self) -> Iterator[Indices]:
        return (self[k] for k in range(len(self)))

    @property
    def owners(self) -> Indices:
        """The number of the list that each of the values is in."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def replaced(self, values: Indices) -> "IndexLists":
        """Return lists of the same sizes with other values."""
        return IndexLists(values, self.sizes)

    def counts(self, kinds: Indices, number: int) -> Indices:
        """Return how many examples of each kind are in each list, of shape (lists, number).

        `kinds` has the kind of every example, from 0 to `number` - 1.
        """
        codes = self.owners * number + kinds[self.values]
        return np.bincount(codes, minlength=len(self) * number).reshape(len(self), number)
