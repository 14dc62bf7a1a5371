"""Pools, which are the examples of one class each, and their division among clients."""

from collections.abc import Sequence

import numpy as np

from feddkd.data.batches import Indices
from feddkd.randomness import Key, generator

Lists = Sequence[Indices]


def make_pools(labels: Indices, classes: int, key: Key) -> list[Indices]:
    """Return the examples of each class, shuffled."""
    order = generator((*key, "pools")).permutation(len(labels))
    return [order[labels[order] == r] for r in range(classes)]


def divide_pools(pools: Lists, counts: Indices) -> list[Indices]:
    """Return each client's examples: client k gets counts[r, k] of pools[r], class after class."""
    clients: list[list[Indices]] = [[] for _ in range(counts.shape[1])]
    for pool, row in zip(pools, counts, strict=True):
        for client, piece in zip(clients, np.split(pool, np.cumsum(row))[:-1], strict=True):
            client.append(piece)
    return [np.concatenate(pieces) for pieces in clients]
