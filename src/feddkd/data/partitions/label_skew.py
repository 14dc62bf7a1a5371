"""Partitions in which a client sees a few classes only.

Each rule takes pools of examples, class by class, and deals them out.
"""

from collections.abc import Iterable

import numpy as np

from feddkd.data.batches import Indices
from feddkd.data.partitions.pools import Lists, deal
from feddkd.errors import InputError
from feddkd.randomness import Key, generator


def draw_shards(pools: Lists, clients: int, per_client: int, key: Key) -> Lists:
    if clients * per_client > sum(map(len, pools)):
        raise InputError(
            f"{clients * per_client} shards cannot be cut from {sum(map(len, pools))} examples:"
            " lower per_client"
        )
    cut = np.array_split(np.concatenate(pools), clients * per_client)
    hands = generator((*key, "shards")).permutation(len(cut)).reshape(clients, per_client)
    return [np.concatenate([cut[s] for s in hand]) for hand in hands]


def draw_independent(pools: Lists, clients: int, per_client: int, key: Key) -> Lists:
    random, size = generator((*key, "independent")), sum(map(len, pools)) // (clients * per_client)
    _require(pools, [size] * len(pools))
    hands = [random.choice(len(pools), per_client, replace=False) for _ in range(clients)]
    return [
        np.concatenate([random.choice(pools[r], size, replace=False) for r in hand])
        for hand in hands
    ]


def draw_star(pools: Lists, clients: int, per_client: int, key: Key) -> Lists:
    """Each class is K shards; a client draws one from each of its classes and one more, maybe the
    same, from the doubled ones.
    """
    random, several = generator((*key, "star")), round(20 / 26 * len(pools))
    if per_client > several:
        raise InputError(
            f"form='star' gives a client {several} of {len(pools)} classes; it cannot double"
            f" {per_client} of them"
        )
    _require(pools, [clients] * len(pools))
    cut = [pool[: len(pool) // clients * clients].reshape(clients, -1) for pool in pools]
    hands = [random.choice(len(pools), several, replace=False) for _ in range(clients)]
    doubled = [random.choice(hand, per_client, replace=False) for hand in hands]
    return [
        np.concatenate([cut[r][random.integers(clients)] for r in (*h, *d)])
        for h, d in zip(hands, doubled, strict=True)
    ]


def draw_exact(pools: Lists, clients: int, per_client: int, key: Key) -> Lists:
    """Of K per_client = q C + r places, r classes ("wide") get q + 1 holders and the others q;
    every client has as many wide classes as the next, give or take one, and a class is cut evenly
    over its holders: so clients come out alike in size.
    """
    q, r = divmod(clients * per_client, len(pools))
    if q == 0:
        raise InputError(
            f"{clients} clients of {per_client} classes cannot hold all {len(pools)} classes: raise"
            " either"
        )
    random = generator((*key, "exact"))
    wide, quota = random.permutation(len(pools)) < r, _even(random, r * (q + 1), clients)
    table = np.zeros((len(pools), clients), np.int64)
    table[wide] = _assign(random, r, q + 1, quota)
    table[~wide] = _assign(random, len(pools) - r, q, per_client - quota)
    _require(pools, table.sum(axis=1))
    for pool, row in zip(pools, table, strict=True):
        row[row > 0] = _even(random, len(pool), row.sum())
    return deal(pools, table)


def _assign(random: np.random.Generator, count: int, holders: int, quota: Indices) -> Indices:
    """Zeros and ones, `count` classes x clients: rows add up to `holders`, columns to the quota.

    A client takes the classes with most room left, ties at random. This never gets stuck: sums as
    even as ours always belong to some table (Gale-Ryser), and if to any, then to one in which the
    client at hand, whichever that is, has the roomiest classes (Havel-Hakimi for bipartite graphs).
    """
    table, room = np.zeros((count, len(quota)), np.int64), np.full(count, holders)
    for k in random.permutation(len(quota)):
        chosen = np.lexsort((random.random(count), -room))[: quota[k]]
        table[chosen, k] = 1
        room[chosen] -= 1
    return table


def _even(random: np.random.Generator, total: int, parts: int) -> Indices:
    """A total in parts that differ by at most one, the larger ones anywhere."""
    return random.permutation((total + np.arange(parts)) // parts)


def _require(pools: Lists, least: Iterable[int]) -> None:
    for r, (pool, needed) in enumerate(zip(pools, least, strict=True)):
        if len(pool) < needed:
            raise InputError(
                f"class {r} has {len(pool)} examples, but {needed} are needed: take fewer clients"
            )
