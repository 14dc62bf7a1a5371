"""Partitions that ignore labels and decide only how many examples each client holds."""

import numpy as np

from feddkd.data.partitions.pools import Lists
from feddkd.data.partitions.registry import PARTITIONS, Partition, Table
from feddkd.randomness import Key, generator


@PARTITIONS.register
def iid() -> Partition:
    """Shuffle all examples and give each client an equal part; sizes differ by at most one.

    McMahan et al., AISTATS 2017, arXiv:1602.05629.
    """

    def draw(table: Table, clients: int, key: Key) -> tuple[Lists, None]:
        order = generator((*key, "iid")).permutation(len(table.labels))
        return np.array_split(order, clients), None

    return Partition(draw, "shuffled, in equal parts")
