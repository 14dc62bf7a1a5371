"""Client-level differential privacy of a run: epsilon, by the noise that its phases declare.

The accountant is the library dp-accounting; this is the only file that imports it. Two federations
are neighbours if one client is replaced by another. That moves the sum of clipped updates by at
most 2 clip (one update is removed, another is added), so noise of deviation z clip is a Gaussian
mechanism of multiplier z / 2. docs/privacy.md says what the numbers mean and what they do not mean.
"""

import logging
import math
from collections.abc import Iterable, Iterator
from functools import cache, partial
from itertools import count, islice, repeat
from types import ModuleType
from typing import Any

import numpy as np

from feddkd.errors import InputError
from feddkd.method import Method, Phase

log = logging.getLogger(__name__)
LEAST = 1e-6  # less noise counts as none: epsilon would be above 1e12


def ledger(
    method: Method, clients: int, cohort: int, delta: float | None, first: int = 1
) -> Iterator[dict[str, float]]:
    """Return an iterator over epsilon and delta for the rows of the rounds from `first` on; over
    empty dicts if the method adds no noise.
    """
    if not any(phase.noise for phase in method.phases):
        return repeat({})
    _library()  # raises an error now, not after the first round
    for phase in filter(_is_bare, method.phases):
        log.warning("uploads in phase %r get no noise: epsilon is infinite", phase.name)
    delta = 1 / (10 * clients) if delta is None else delta
    multipliers = map(partial(multiplier, method), count(1))
    rows = (
        {"epsilon": epsilon, "delta": delta}
        for epsilon in epsilons(multipliers, clients, cohort, delta)
    )
    return islice(rows, first - 1, None)


def multiplier(method: Method, round: int) -> float:
    """Return the noise multiplier of all releases of a round as one: (sum_i z_i^-2)^(-1/2). It is 0
    if one release has no noise, infinity if there are no releases.
    """
    phases = [exchange.phase for exchange in method.plan(round)]
    if any(map(_is_bare, phases)):
        return 0.0
    total = math.fsum(phase.noise**-2 for phase in phases if phase.noise)
    return total**-0.5 if total else math.inf


def _is_bare(phase: Phase) -> bool:
    """Return True if the phase collects uploads and adds less than the least noise."""
    return phase.asks_clients and bool(phase.collect or phase.every) and phase.noise < LEAST


def epsilons(
    multipliers: Iterable[float], clients: int, cohort: int, delta: float
) -> Iterator[float]:
    """Yield epsilon after each round, given the multipliers of the rounds' releases; cohorts are
    drawn without replacement.

    It is the smaller of two bounds. The first assumes that every client takes part in every round:
    then the whole composition is one Gaussian mechanism, and its epsilon is known exactly. The
    second is that of the Renyi accountant, which takes into account that most clients do not take
    part.
    """
    library = _library()
    # cached: it takes a third of a second, and most rounds are equal
    cost = cache(partial(_cost, library, clients, cohort))
    orders, spent, precision = library.rdp.RdpAccountant().orders, 0.0, 0.0
    for z in multipliers:
        spent, precision = spent + cost(z), precision + ((2 / z) ** 2 if z else math.inf)
        # the library takes the logarithm of 0 and handles the result
        with np.errstate(divide="ignore"):
            exact = library.get_epsilon_gaussian(precision**-0.5 if precision else math.inf, delta)
        yield min(float(exact), float(library.rdp.compute_epsilon(orders, spent, delta)[0]))


def _cost(library: Any, clients: int, cohort: int, z: float) -> Any:
    """Return the Renyi divergences of a round, one for each order."""
    neighbours = library.NeighboringRelation.REPLACE_ONE
    accountant = library.rdp.RdpAccountant(neighboring_relation=neighbours)
    if z in (0, math.inf):
        return accountant.compose(library.NoOpDpEvent() if z else library.NonPrivateDpEvent()).rdp
    release = library.GaussianDpEvent(z / 2)
    drawn = library.SampledWithoutReplacementDpEvent(clients, cohort, release)
    return accountant.compose(drawn).rdp


def _library() -> ModuleType:
    try:
        import dp_accounting
    except ImportError:
        raise InputError(
            "noise needs the package dp-accounting, which is not installed: pip install"
            " 'feddkd[privacy]'"
        ) from None
    return dp_accounting  # type: ignore[no-any-return]
