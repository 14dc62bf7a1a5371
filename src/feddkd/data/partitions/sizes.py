"""Partitions that ignore labels and decide only how many examples each client holds."""

import numpy as np

from feddkd.data.batches import Indices
from feddkd.data.index_lists import IndexLists
from feddkd.data.partitions.pools import Lists
from feddkd.data.partitions.proportions import Floats, check_minimum, cut, log_gammas
from feddkd.data.partitions.registry import PARTITIONS, Partition, Table
from feddkd.randomness import Key, generator
from feddkd.spec.types import Count, Positive


@PARTITIONS.register
def iid() -> Partition:
    """Shuffle all examples and give each client an equal part; sizes differ by at most one.

    McMahan et al., AISTATS 2017, arXiv:1602.05629.
    """

    def draw(table: Table, clients: int, key: Key) -> tuple[Lists, None]:
        order = generator((*key, "iid")).permutation(len(table.labels))
        return np.array_split(order, clients), None

    return Partition(draw, "shuffled, in equal parts")


@PARTITIONS.register
def quantity(alpha: Positive = 0.5, minimum: Count = 1) -> Partition:
    """Shuffle all examples and divide them in proportion to a draw of Dir_K(alpha).

    It is the quantity skew of Li et al., ICDE 2022, arXiv:2102.02079. Each client gets the minimum
    first, and the draw divides the rest.
    """

    def draw(table: Table, clients: int, key: Key) -> tuple[Lists, None]:
        log_g = log_gammas(generator((*key, "sizes")), alpha, (clients,))
        return _in_sizes(_sizes(log_g, len(table.labels), minimum), key), None

    return Partition(draw, f"shuffled, in sizes of a draw of Dirichlet({alpha:g})")


@PARTITIONS.register
def power_law(exponent: Positive = 1.0, minimum: Count = 1) -> Partition:
    """Shuffle all examples; the j-th largest client has a part in proportion to j^-exponent.

    Which client is the j-th largest is drawn. Each client gets the minimum first, and the rest is
    divided by the rule. Sizes by a power law are those of Li et al., MLSys 2020, arXiv:1812.06127.
    """

    def draw(table: Table, clients: int, key: Key) -> tuple[Lists, None]:
        ranks = 1.0 + generator((*key, "sizes")).permutation(clients)
        return _in_sizes(_sizes(-exponent * np.log(ranks), len(table.labels), minimum), key), None

    return Partition(draw, f"shuffled, in sizes of a power law with exponent {exponent:g}")


def _sizes(log_shares: Floats, total: int, minimum: int) -> Indices:
    """Return sizes that add up to the total: the minimum, and the rest in these shares."""
    clients = len(log_shares)
    check_minimum(clients, minimum, total)
    return minimum + cut(log_shares, total - clients * minimum)


def _in_sizes(sizes: Indices, key: Key) -> IndexLists:
    """Return shuffled positions in lists of these sizes."""
    return IndexLists(generator((*key, "quantity")).permutation(sizes.sum()), sizes)
