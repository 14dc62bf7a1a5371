"""Pools, which are the examples of one class each, and their division among clients."""

from collections.abc import Sequence

import numpy as np

from feddkd.data.batches import Indices
from feddkd.data.index_lists import IndexLists
from feddkd.randomness import Key, generator

Lists = Sequence[Indices]


def make_pools(labels: Indices, classes: int, key: Key) -> list[Indices]:
    """Return the examples of each class, shuffled."""
    order = generator((*key, "pools")).permutation(len(labels))
    by_class = order[np.argsort(labels[order], kind="stable")]
    ends = np.cumsum(np.bincount(labels, minlength=classes))
    return np.split(by_class, ends)[:classes]


def divide_pools(pools: Lists, counts: Indices) -> IndexLists:
    """Return each client's examples: client k gets counts[r, k] of pools[r], class after class."""
    classes, clients = counts.shape
    given = [pool[: row.sum()] for pool, row in zip(pools, counts, strict=True)]
    owners = np.repeat(np.tile(np.arange(clients), classes), counts.ravel())
    return IndexLists.grouped(np.concatenate(given), owners, clients)
