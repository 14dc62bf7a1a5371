"""The Dirichlet partition for many small clients: each client draws its own mixture of the classes.

For C classes with shares p_r of the examples, client k draws

    q_k ~ Dir_C(alpha C p)

and a class by q_k for each of its N/K examples. If the classes have equal shares, this is
Dir_C(alpha, ..., alpha). On average clients ask for as many examples of a class as there are. Where
they ask for more, some of their examples, drawn at random, are of other classes that are left.

Hsu, Qi and Brown, 2019, arXiv:1909.06335; their alpha is C alpha here.
"""

import numpy as np

from feddkd.data.batches import Indices
from feddkd.data.index_lists import IndexLists
from feddkd.data.partitions.pools import Lists
from feddkd.data.partitions.proportions import Floats, check_minimum, log_gammas
from feddkd.randomness import Key, generator


def draw_mixtures(
    pools: Lists, clients: int, key: Key, *, alpha: float, minimum: int
) -> IndexLists:
    """Return lists of equal sizes, up to one, that use every example once."""
    pools = [pool for pool in pools if len(pool)]
    held = np.array([len(pool) for pool in pools])
    total = int(held.sum())
    check_minimum(clients, minimum, total)
    sizes = (total + np.arange(clients)) // clients
    random = generator((*key, "mixtures"))
    asked = _ask(random, sizes, alpha * len(pools) * held / total)
    _settle(random, asked, held)
    values = np.empty(total, np.int64)
    values[np.argsort(asked, kind="stable")] = np.concatenate(pools)
    return IndexLists(values, sizes)


def _ask(random: np.random.Generator, sizes: Indices, alpha: Floats) -> Indices:
    """Return the class that each example should have, client after client.

    As in `cut`, shares are rounded so that they do not depend on the machine's `exp`.
    """
    clients, classes = len(sizes), len(alpha)
    log_g = log_gammas(random, alpha, (clients, classes))
    sums = np.cumsum(np.exp(log_g - log_g.max(axis=1, keepdims=True)), axis=1)
    edges = np.round(sums / sums[:, -1:], 12) + np.arange(clients)[:, None]
    owners = np.repeat(np.arange(clients), sizes)
    drawn = owners + random.random(len(owners))
    asked = np.searchsorted(edges.ravel(), drawn, side="right") - owners * classes
    return np.asarray(np.minimum(asked, classes - 1))  # a draw next to 1 may be rounded up to 1


def _settle(random: np.random.Generator, asked: Indices, held: Indices) -> None:
    """Change some of the classes that are asked for, so that each is asked for as often as held."""
    times = np.bincount(asked, minlength=len(held))
    order = random.permutation(len(asked))
    order = order[np.argsort(asked[order], kind="stable")]
    rank = np.arange(len(asked)) - np.repeat(np.cumsum(times) - times, times)
    beyond = order[rank >= np.repeat(held, times)]
    left = np.repeat(np.arange(len(held)), np.maximum(held - times, 0))
    asked[beyond] = random.permutation(left)
