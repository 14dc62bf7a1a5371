"""Partitions in which a client sees only a few classes.

Each rule takes the pools of examples, one for each class, and divides them among the clients.
"""

from collections.abc import Iterable
from typing import Literal

import numpy as np

from feddkd.data.batches import Indices
from feddkd.data.partitions.pools import Lists, divide_pools, make_pools
from feddkd.data.partitions.registry import PARTITIONS, Partition, Table
from feddkd.errors import InputError
from feddkd.randomness import Key, generator
from feddkd.spec.types import Count


@PARTITIONS.register
def classes(
    per_client: Count = 6, form: Literal["exact", "independent", "shards", "star"] = "exact"
) -> Partition:
    """Give each client `per_client` classes, in one of four readings of FedDKD's "6 of 26 classes".

    exact: disjoint lists of exactly that number of classes, which use every example, as the FedDKD
        paper states the problem.
    independent: each client draws its classes, and N/(K per_client) examples of each, independently
        of the others; clients' lists overlap and may miss a class. It reproduces the paper's
        figures.
    shards: that number of label-sorted shards for each client, as in `shards`.
    star: `femnist_star` of FedMAX (Chen et al., ECML-PKDD 2020, arXiv:2004.03657): 20 of 26
        classes, `per_client` of them twice.
    """
    rule = {
        "exact": draw_exact,
        "independent": draw_independent,
        "shards": draw_shards,
        "star": draw_star,
    }[form]

    def draw(table: Table, clients: int, key: Key) -> tuple[Lists, None]:
        if per_client > table.classes:
            raise InputError(
                f"a client cannot hold {per_client} classes of {table.classes}: lower per_client"
            )
        return rule(make_pools(table.labels, table.classes, key), clients, per_client, key), None

    return Partition(draw, f"{per_client} classes a client ({form})", needs_classes=True)


@PARTITIONS.register
def shards(per_client: Count = 2) -> Partition:
    """Sort by label, cut into K per_client shards, and give each client `per_client` of them.

    McMahan et al., AISTATS 2017.
    """

    def draw(table: Table, clients: int, key: Key) -> tuple[Lists, None]:
        pools = make_pools(table.labels, table.classes, key)
        return draw_shards(pools, clients, per_client, key), None

    return Partition(draw, f"{per_client} label-sorted shards a client", needs_classes=True)


def draw_shards(pools: Lists, clients: int, per_client: int, key: Key) -> Lists:
    """Return `per_client` random shards for each client, of examples that are sorted by label."""
    total = sum(map(len, pools))
    if clients * per_client > total:
        raise InputError(
            f"{clients * per_client} shards cannot be cut from {total} examples: lower per_client"
        )
    shards = np.array_split(np.concatenate(pools), clients * per_client)
    order = generator((*key, "shards")).permutation(len(shards))
    chosen = order.reshape(clients, per_client)
    return [np.concatenate([shards[s] for s in row]) for row in chosen]


def draw_independent(pools: Lists, clients: int, per_client: int, key: Key) -> Lists:
    """Return for each client its own draw of classes, and of the same number of examples each."""
    random, size = generator((*key, "independent")), sum(map(len, pools)) // (clients * per_client)
    _require(pools, [size] * len(pools))
    chosen = [random.choice(len(pools), per_client, replace=False) for _ in range(clients)]
    return [
        np.concatenate([random.choice(pools[r], size, replace=False) for r in classes])
        for classes in chosen
    ]


def draw_star(pools: Lists, clients: int, per_client: int, key: Key) -> Lists:
    """Return for each client one of K shards of each of its classes, and more of some of them.

    `per_client` of its classes are doubled: it draws a second shard of these, maybe the same one.
    """
    random, several = generator((*key, "star")), round(20 / 26 * len(pools))
    if per_client > several:
        raise InputError(
            f"form='star' gives a client {several} of {len(pools)} classes; it cannot double"
            f" {per_client} of them"
        )
    _require(pools, [clients] * len(pools))
    shards = [pool[: len(pool) // clients * clients].reshape(clients, -1) for pool in pools]
    chosen = [random.choice(len(pools), several, replace=False) for _ in range(clients)]
    doubled = [random.choice(classes, per_client, replace=False) for classes in chosen]
    return [
        np.concatenate([shards[r][random.integers(clients)] for r in (*once, *again)])
        for once, again in zip(chosen, doubled, strict=True)
    ]


def draw_exact(pools: Lists, clients: int, per_client: int, key: Key) -> Lists:
    """Return disjoint lists of exactly `per_client` classes each, which use every example.

    With K clients and C classes, K per_client = q C + r: r "wide" classes have q + 1 clients each,
    the others have q. The clients' numbers of wide classes differ by at most one, and a class is
    cut evenly over its clients, so that all clients hold about the same number of examples.
    """
    q, r = divmod(clients * per_client, len(pools))
    if q == 0:
        raise InputError(
            f"{clients} clients of {per_client} classes cannot hold all {len(pools)} classes: raise"
            " the number of clients or of classes"
        )
    random = generator((*key, "exact"))
    wide, quota = random.permutation(len(pools)) < r, _even(random, r * (q + 1), clients)
    counts = np.zeros((len(pools), clients), np.int64)
    counts[wide] = _assign(random, r, q + 1, quota)
    counts[~wide] = _assign(random, len(pools) - r, q, per_client - quota)
    _require(pools, counts.sum(axis=1))
    for pool, row in zip(pools, counts, strict=True):
        row[row > 0] = _even(random, len(pool), row.sum())
    return divide_pools(pools, counts)


def _assign(random: np.random.Generator, count: int, holders: int, quota: Indices) -> Indices:
    """Return a 0-1 matrix, `count` classes x clients, with row sums `holders`, column sums `quota`.

    Each client takes the classes that still need most clients; ties are broken at random. This
    always succeeds. A matrix with such even sums exists (Gale-Ryser). If one exists, then there is
    one in which the next client, in any order of clients, takes the classes that still need most
    (Havel-Hakimi for bipartite graphs).
    """
    matrix, needed = np.zeros((count, len(quota)), np.int64), np.full(count, holders)
    for k in random.permutation(len(quota)):
        chosen = np.lexsort((random.random(count), -needed))[: quota[k]]
        matrix[chosen, k] = 1
        needed[chosen] -= 1
    return matrix


def _even(random: np.random.Generator, total: int, parts: int) -> Indices:
    """Return a total in parts that differ by at most one, the larger parts in random places."""
    return random.permutation((total + np.arange(parts)) // parts)


def _require(pools: Lists, least: Iterable[int]) -> None:
    for r, (pool, needed) in enumerate(zip(pools, least, strict=True)):
        if len(pool) < needed:
            raise InputError(
                f"class {r} has {len(pool)} examples, but {needed} are needed: take fewer clients"
            )
