"""Partitions by kind of example: each client holds one kind and is tested on that kind.

The kinds are domains: of the source, of owners in its data, or clusters that are found here.
"""

import numpy as np

from feddkd.data.batches import Indices
from feddkd.data.index_lists import IndexLists
from feddkd.data.partitions.clusters import find_clusters
from feddkd.data.partitions.pools import Lists
from feddkd.data.partitions.registry import PARTITIONS, Partition, Table
from feddkd.errors import InputError
from feddkd.randomness import Key, generator
from feddkd.spec.types import Count


@PARTITIONS.register
def domains() -> Partition:
    """Give client k the k-th domain, and test it on that domain.

    FedBN: Li et al., ICLR 2021, arXiv:2102.07623.
    """

    def draw(table: Table, clients: int, key: Key) -> tuple[Lists, Lists]:
        if table.domains is None or table.test_domains is None:
            raise InputError("partition 'domains' needs data with domains; these have none")
        return _one_each(table.domains, table.test_domains, clients, "domains")

    return Partition(draw, "one client a domain", own_tests=True, by_domain=True)


@PARTITIONS.register
def owners(minimum: Count = 1) -> Partition:
    """Give client k all training examples of one owner.

    The owners are the domains of the data, such as the writers of letters or the column `domain` of
    a table. With fewer clients than owners, owners with at least the minimum of examples are drawn.
    All clients are tested on the whole test set, or with client_tests = "own" on their owner's.
    """

    def draw(table: Table, clients: int, key: Key) -> tuple[Lists, None]:
        if table.domains is None:
            raise InputError(
                "partition 'owners' needs data with owners, as table(owner='column') and"
                " feddkd.from_table(owner=...) give them; these have none"
            )
        names, counts = np.unique(table.domains, return_counts=True)
        names = names[counts >= minimum]
        if clients > len(names):
            raise InputError(
                f"partition 'owners': {len(names)} owners have at least {minimum} training"
                f" examples, too few for {clients} clients"
            )
        chosen = np.sort(generator((*key, "owners")).choice(names, clients, replace=False))
        return _by_name(table.domains, chosen), None

    return Partition(draw, "one client an owner", by_domain=True)


@PARTITIONS.register
def clusters(dimensions: Count = 32) -> Partition:
    """Find K clusters of similar examples, give client k the k-th, and test it on that cluster.

    The clusters are those of k-means on a random projection of the examples to this number of
    dimensions. The labels play no part.
    """

    def draw(table: Table, clients: int, key: Key) -> tuple[Lists, Lists]:
        assert table.domains is not None, "the clusters are in the place of domains"
        assert table.test_domains is not None
        return _one_each(table.domains, table.test_domains, clients, "clusters")

    def find(x: Indices, clients: int, key: Key) -> Indices:
        return find_clusters(x, clients, dimensions, key)

    summary = "one client a cluster of similar examples"
    return Partition(draw, summary, own_tests=True, by_domain=True, find_domains=find)


def _one_each(
    domains: Indices, test_domains: Indices, clients: int, partition: str
) -> tuple[IndexLists, IndexLists]:
    """Return training and test lists with one domain a client."""
    names = np.unique(domains)
    if clients != len(names):
        raise InputError(
            f"partition {partition!r} makes one client of each domain: {len(names)} clients, not"
            f" {clients}"
        )
    return _by_name(domains, names), _by_name(test_domains, names)


def _by_name(domains: Indices, names: Indices) -> IndexLists:
    """Return for each of the sorted names the positions of its examples, in stored order."""
    places = np.minimum(np.searchsorted(names, domains), len(names) - 1)
    known = np.flatnonzero(names[places] == domains)
    return IndexLists.grouped(known, places[known], len(names))
