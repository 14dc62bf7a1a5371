"""Shares drawn from a Dirichlet distribution, and whole numbers in proportion to shares."""

import numpy as np
import numpy.typing as npt

from feddkd.data.batches import Indices
from feddkd.errors import InputError

Floats = npt.NDArray[np.float64]


def log_gammas(
    random: np.random.Generator, alpha: float | Floats, shape: tuple[int, ...]
) -> Floats:
    """Return logarithms of Gamma(alpha) draws, by Gamma(a) = Gamma(a + 1) U^(1/a).

    In logarithms a small alpha cannot make all draws zero.
    """
    log_u = np.log1p(-random.random(shape))
    log_one_more = np.log(random.standard_gamma(alpha + 1, shape))
    return np.asarray(log_one_more + log_u / np.maximum(alpha, 1e-300))


def cut(log_g: Floats, count: int) -> Indices:
    """Return `count` examples divided in proportion to exp(log_g).

    Shares are rounded to twelve places. For small alpha many sums lie within a rounding error of 1,
    and the side on which they fall must not depend on the machine's `exp`.
    """
    total = np.cumsum(np.exp(log_g - log_g.max()))
    edges = np.floor(np.round(total / total[-1], 12) * count).astype(np.int64)
    return np.asarray(np.diff(edges, prepend=0))


def check_minimum(clients: int, minimum: int, total: int, note: str = "") -> None:
    """Raise InputError if there are too few examples to give each client the minimum."""
    if clients * minimum > total:
        raise InputError(
            f"{clients} clients with at least {minimum} examples each need {clients * minimum}"
            f" examples, but only {total} are divided{note}: lower the minimum or the number of"
            " clients"
        )
