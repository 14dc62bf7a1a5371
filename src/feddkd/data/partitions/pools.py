"""Pools of examples, class by class, and the deal: who gets how many of each."""

from collections.abc import Sequence

import numpy as np

from feddkd.data.batches import Indices
from feddkd.randomness import Key, generator

Lists = Sequence[Indices]


def make_pools(labels: Indices, classes: int, key: Key) -> list[Indices]:
    """The examples of each class, shuffled."""
    order = generator((*key, "pools")).permutation(len(labels))
    return [order[labels[order] == r] for r in range(classes)]


def deal(pools: Lists, table: Indices) -> list[Indices]:
    """Client k gets table[r, k] examples of pools[r], class after class."""
    pieces = [np.split(pool, np.cumsum(row))[:-1] for pool, row in zip(pools, table, strict=True)]
    return [np.concatenate(own) for own in zip(*pieces, strict=True)]
