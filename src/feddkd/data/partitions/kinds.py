"""Partitions by kind of example: each client holds one kind and is tested on that kind."""

import numpy as np

from feddkd.data.partitions.pools import Lists
from feddkd.data.partitions.registry import PARTITIONS, Partition, Table
from feddkd.errors import InputError
from feddkd.randomness import Key


@PARTITIONS.register
def domains() -> Partition:
    """Give client k the k-th domain, and test it on that domain.

    FedBN: Li et al., ICLR 2021, arXiv:2102.07623.
    """

    def draw(table: Table, clients: int, key: Key) -> tuple[Lists, Lists]:
        if table.domains is None or table.test_domains is None:
            raise InputError("partition 'domains' needs data with domains; these have none")
        names = np.unique(table.domains)
        if clients != len(names):
            raise InputError(
                f"partition 'domains' makes one client of each domain: {len(names)} clients, not"
                f" {clients}"
            )
        train = [np.flatnonzero(table.domains == name) for name in names]
        return train, [np.flatnonzero(table.test_domains == name) for name in names]

    return Partition(draw, "one client a domain", own_tests=True)
