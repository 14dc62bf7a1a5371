"""Dirichlet partitions.

For every class r with n_r examples, and K clients (Yurochkin et al., ICML 2019, arXiv:1905.12022):

    p ~ Dir_K(alpha)
    client k gets floor(n_r (p_1 + ... + p_k)) - floor(n_r (p_1 + ... + p_{k-1})) of the examples

Only the numbers are drawn here, and not the examples. So a draw that leaves a client with too few
examples costs almost nothing, and is repeated. For many small clients no draw succeeds; the form
"mixtures" serves them.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from feddkd.data.batches import Indices
from feddkd.data.partitions.mixtures import draw_mixtures
from feddkd.data.partitions.pools import Lists, divide_pools, make_pools
from feddkd.data.partitions.proportions import check_minimum, cut, log_gammas
from feddkd.data.partitions.registry import PARTITIONS, Partition, Table
from feddkd.errors import InputError
from feddkd.randomness import Key, generator
from feddkd.spec.types import Count, Positive, Share

# draws at most; FedGen's own setting (alpha=.05) takes 15 on average
TRIES = 1_000


@PARTITIONS.register
def dirichlet(
    alpha: Positive = 0.1,
    form: Literal["plain", "fedma", "fedgen", "mixtures"] = "plain",
    minimum: Count = 10,
    ratio: Share | None = None,
) -> Partition:
    """Divide each class by its own draw from Dir_K(alpha).

    All classes are drawn again until the smallest client has the minimum.

    plain: nothing else, as the FedDKD paper says.
    fedma: a client that holds N/K examples gets nothing of later classes (Wang et al., ICLR 2020,
        arXiv:2002.06440, its code).
    fedgen: as fedma, with a share `ratio` (.1 if not given) of every class; the minimum is for each
        class; clients are tested on the labels that they hold (Zhu et al., ICML 2021,
        arXiv:2105.10056, its code).
    mixtures: for many small clients. Each client draws its own mixture of the classes, then equally
        many examples by its mixture (Hsu et al., 2019, arXiv:1909.06335).
    """
    if ratio is not None and form != "fedgen":
        raise InputError(
            f"partition 'dirichlet': ratio does not go with form={form!r}, only with form='fedgen'"
        )

    def draw(table: Table, clients: int, key: Key) -> tuple[Lists, Lists | None]:
        pools = make_pools(table.labels, table.classes, key)
        if form == "mixtures":
            return draw_mixtures(pools, clients, key, alpha=alpha, minimum=minimum), None
        if form != "fedgen":
            balance = form == "fedma"
            lists = draw_plain(pools, clients, key, alpha=alpha, minimum=minimum, balance=balance)
            return lists, None
        tests = [np.flatnonzero(table.test_labels == r) for r in range(table.classes)]
        share = 0.1 if ratio is None else ratio
        return draw_fedgen(pools, tests, clients, key, alpha=alpha, minimum=minimum, ratio=share)

    summary = f"Dirichlet({alpha:g}) over clients, class by class ({form})"
    return Partition(draw, summary, own_tests=form == "fedgen", needs_classes=True)


def draw_plain(
    pools: Lists, clients: int, key: Key, *, alpha: float, minimum: int, balance: bool
) -> Lists:
    """Return the plain Dirichlet partition.

    With `balance`, as in FedMA's code, a client that holds N/K examples gets nothing of the classes
    that follow.
    """
    cap = sum(map(len, pools)) / clients if balance else np.inf
    sizes = [len(pool) for pool in pools]
    counts = _counts(key, sizes, clients, alpha, minimum, cap, range(len(pools)))
    random = generator((*key, "shuffle"))
    return [random.permutation(client) for client in divide_pools(pools, counts)]


def draw_fedgen(
    pools: Lists, tests: Lists, clients: int, key: Key, *, alpha: float, minimum: int, ratio: float
) -> tuple[Lists, Lists]:
    """Return the partition of FedGen's code, with test lists.

    Only a share of every class is divided, in a shuffled order of classes, and each client's list
    stays sorted by class. A client's test list holds, for each label in its training list, the next
    K-th part of that label's test examples; the remaining test examples are not used.
    """
    order = generator((*key, "order")).permutation(len(pools))
    cap = ratio * sum(map(len, pools)) / clients
    kept = [pool[: int(min(cap, ratio * len(pool)))] if ratio < 1 else pool for pool in pools]
    sizes = [len(pool) for pool in kept]
    note = (
        f" (form='fedgen' asks for minimum={minimum} of each of {len(pools)} classes, and ratio="
        f"{ratio:g} divides no more of each class: a higher ratio divides more)"
    )
    counts = _counts(key, sizes, clients, alpha, minimum * len(pools), cap, order.tolist(), note)
    test_counts = np.where(counts > 0, np.array([[len(pool) // clients] for pool in tests]), 0)
    train = divide_pools([kept[r] for r in order], counts[order])
    return train, divide_pools(tests, test_counts)


def _counts(
    key: Key,
    sizes: Sequence[int],
    clients: int,
    alpha: float,
    minimum: int,
    cap: float,
    order: Iterable[int],
    note: str = "",
) -> Indices:
    """Return numbers of examples, classes x clients, that give each client the minimum or more.

    The row of a class adds up to the class's size. `note` explains the numbers in an error.
    """
    total = sum(sizes)
    check_minimum(clients, minimum, total, note)
    best = 0
    for attempt in range(TRIES):
        random = generator((*key, "dirichlet", attempt))
        counts = _attempt(random, sizes, clients, alpha, cap, order)
        smallest = int(counts.sum(axis=0).min())
        if smallest >= minimum:
            return counts
        best = max(best, smallest)
    raise InputError(
        f"{TRIES} draws with alpha={alpha:g} never divided {total} examples among {clients} clients"
        f" with at least {minimum} examples each{note}; the best left the smallest client with"
        f" {best}: raise alpha, lower the minimum, take fewer clients, or take form='mixtures',"
        " which serves many small clients"
    )


def _attempt(
    random: np.random.Generator,
    sizes: Sequence[int],
    clients: int,
    alpha: float,
    cap: float,
    order: Iterable[int],
) -> Indices:
    counts, held = np.zeros((len(sizes), clients), np.int64), np.zeros(clients, np.int64)
    log_g = log_gammas(random, alpha, counts.shape)
    for r in order:
        # if the class has examples, a client is below the cap: sizes add up to <= clients * cap
        if sizes[r]:
            counts[r] = cut(np.where(held < cap, log_g[r], -np.inf), sizes[r])
            held += counts[r]
    return counts
