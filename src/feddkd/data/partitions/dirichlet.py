"""Dirichlet partitions. For every class r of n_r examples and K clients:
    p ~ Dir_K(alpha);  client k gets floor(n_r (p_1 + ... + p_k)) - floor(n_r (p_1 + ... + p_{k-1})) of them
(Yurochkin et al., ICML 2019, arXiv:1905.12022). Only numbers are drawn, no examples: a draw that
leaves a client too poor costs next to nothing, and is made again.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from feddkd.data.batches import Indices
from feddkd.data.partitions.pools import Lists, deal
from feddkd.errors import InputError
from feddkd.randomness import Key, generator

Floats = npt.NDArray[np.float64]
# FedGen's own setting takes 15 on average at alpha=.05; what has not come by now is not worth
# waiting for
TRIES = 1_000


def draw_plain(
    pools: Lists, clients: int, key: Key, *, alpha: float, minimum: int, balance: bool
) -> Lists:
    """With `balance` as FedMA's code has it: a client that holds N/K examples gets nothing of the
    classes that follow.
    """
    cap = sum(map(len, pools)) / clients if balance else np.inf
    table = _table(
        key, [len(pool) for pool in pools], clients, alpha, minimum, cap, range(len(pools))
    )
    random = generator((*key, "shuffle"))
    return [random.permutation(own) for own in deal(pools, table)]


def draw_fedgen(
    pools: Lists, tests: Lists, clients: int, key: Key, *, alpha: float, minimum: int, ratio: float
) -> tuple[Lists, Lists]:
    """FedGen's code: only a share of every class is dealt, classes in shuffled order, and clients'
    lists stay class by class.

    A client's test list holds, for each label it owns, the next K-th part of that label's test
    examples; nobody gets the rest.
    """
    order = generator((*key, "order")).permutation(len(pools))
    cap = ratio * sum(map(len, pools)) / clients
    kept = [pool[: int(min(cap, ratio * len(pool)))] if ratio < 1 else pool for pool in pools]
    table = _table(
        key, [len(pool) for pool in kept], clients, alpha, minimum * len(pools), cap, order.tolist()
    )
    test_table = np.where(table > 0, np.array([[len(pool) // clients] for pool in tests]), 0)
    return deal([kept[r] for r in order], table[order]), deal(tests, test_table)


def _table(
    key: Key,
    supply: Sequence[int],
    clients: int,
    alpha: float,
    minimum: int,
    cap: float,
    order: Iterable[int],
) -> Indices:
    """Classes x clients: rows add up to the supply, columns to the minimum or more."""
    total, asked = sum(supply), f"{clients} clients with at least {minimum} examples each"
    if clients * minimum > total:
        raise InputError(
            f"{asked} need {clients * minimum} examples, and {total} are divided: lower the minimum"
            " or the clients"
        )
    best = 0
    for attempt in range(TRIES):
        table = _attempt(
            generator((*key, "dirichlet", attempt)), supply, clients, alpha, cap, order
        )
        smallest = int(table.sum(axis=0).min())
        if smallest >= minimum:
            return table
        best = max(best, smallest)
    raise InputError(
        f"{TRIES} draws with alpha={alpha:g} never divided {total} examples among {asked}; the best"
        f" left the smallest client with {best}: raise alpha, lower the minimum or take fewer"
        " clients"
    )


def _attempt(
    random: np.random.Generator,
    supply: Sequence[int],
    clients: int,
    alpha: float,
    cap: float,
    order: Iterable[int],
) -> Indices:
    table, held = np.zeros((len(supply), clients), np.int64), np.zeros(clients, np.int64)
    log_g = _log_gammas(random, alpha, table.shape)
    for r in order:
        # so that somebody is below the cap: the supplies add up to at most clients * cap
        if supply[r]:
            table[r] = _cut(np.where(held < cap, log_g[r], -np.inf), supply[r])
            held += table[r]
    return table


def _log_gammas(random: np.random.Generator, alpha: float, shape: tuple[int, ...]) -> Floats:
    """Logarithms of Gamma(alpha) draws, by Gamma(a) = Gamma(a + 1) U^(1/a): a small alpha cannot
    make all of them zero.
    """
    log_u = np.log1p(-random.random(shape))
    return np.asarray(np.log(random.standard_gamma(alpha + 1, shape)) + log_u / max(alpha, 1e-300))


def _cut(log_g: Floats, count: int) -> Indices:
    """`count` examples divided in proportion to exp(log_g).

    Shares are rounded to twelve places: for small alpha many sums lie within a rounding error of 1,
    and on which side they fall must not depend on the machine's `exp`.
    """
    total = np.cumsum(np.exp(log_g - log_g.max()))
    edges = np.floor(np.round(total / total[-1], 12) * count).astype(np.int64)
    return np.asarray(np.diff(edges, prepend=0))
