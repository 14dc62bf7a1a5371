"""What a run gives away: epsilon of client-level differential privacy, by the noise that its phases
declare.

The accountant is the library dp-accounting; this is the only file that knows it. Two federations
are neighbours if one client has been replaced. That moves the sum of clipped updates by at most 2
clip (one goes, another comes), and noise of deviation z clip is therefore a Gaussian mechanism of
multiplier z / 2. docs/privacy.md says what the numbers mean, and what not.
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
LEAST = 1e-6  # noise below it is none: epsilon would be beyond 1e12


def ledger(
    method: Method, clients: int, cohort: int, delta: float | None, first: int = 1
) -> Iterator[dict[str, float]]:
    """What the row of each round has to say, from round `first` on: nothing, if the method makes no
    noise.
    """
    if not any(phase.noise for phase in method.phases):
        return repeat({})
    _library()  # or complain now, not after the first round
    for phase in filter(_is_bare, method.phases):
        log.warning(
            "what clients upload in phase %r goes without noise: epsilon is infinite", phase.name
        )
    delta = 1 / (10 * clients) if delta is None else delta
    spent = epsilons(map(partial(multiplier, method), count(1)), clients, cohort, delta)
    return islice(({"epsilon": epsilon, "delta": delta} for epsilon in spent), first - 1, None)


def multiplier(method: Method, round: int) -> float:
    """Of all of a round's releases as if they were one: (sum_i z_i^-2)^(-1/2). 0: one is bare;
    infinity: there are none.
    """
    phases = [exchange.phase for exchange in method.plan(round)]
    if any(map(_is_bare, phases)):
        return 0.0
    total = math.fsum(phase.noise**-2 for phase in phases if phase.noise)
    return total**-0.5 if total else math.inf


def _is_bare(phase: Phase) -> bool:
    """Whether it takes something from clients and adds no noise worth the name."""
    return phase.asks_clients and bool(phase.collect or phase.every) and phase.noise < LEAST


def epsilons(
    multipliers: Iterable[float], clients: int, cohort: int, delta: float
) -> Iterator[float]:
    """Epsilon after each round, given the multipliers of the rounds' releases; cohorts are drawn
    without replacement.

    Two bounds, and the smaller counts: as if everybody took part in every round, when the whole
    composition is one Gaussian mechanism and its epsilon is known exactly; and the Renyi
    accountant's, which counts in that most clients stay out of it.
    """
    library = _library()
    # a third of a second each, and most rounds are alike
    cost = cache(partial(_cost, library, clients, cohort))
    orders, spent, precision = library.rdp.RdpAccountant().orders, 0.0, 0.0
    for z in multipliers:
        spent, precision = spent + cost(z), precision + ((2 / z) ** 2 if z else math.inf)
        # the library takes the logarithm of nought and knows what to make of it
        with np.errstate(divide="ignore"):
            exact = library.get_epsilon_gaussian(precision**-0.5 if precision else math.inf, delta)
        yield min(float(exact), float(library.rdp.compute_epsilon(orders, spent, delta)[0]))


def _cost(library: Any, clients: int, cohort: int, z: float) -> Any:
    """A round's Renyi divergences, order by order."""
    accountant = library.rdp.RdpAccountant(
        neighboring_relation=library.NeighboringRelation.REPLACE_ONE
    )
    if z in (0, math.inf):
        return accountant.compose(library.NoOpDpEvent() if z else library.NonPrivateDpEvent()).rdp
    release = library.GaussianDpEvent(z / 2)
    return accountant.compose(
        library.SampledWithoutReplacementDpEvent(clients, cohort, release)
    ).rdp


def _library() -> ModuleType:
    try:
        import dp_accounting
    except ImportError:
        raise InputError(
            "noise is accounted for by dp-accounting, which is not installed: pip install"
            " 'feddkd[privacy]'"
        ) from None
    return dp_accounting  # type: ignore[no-any-return]
