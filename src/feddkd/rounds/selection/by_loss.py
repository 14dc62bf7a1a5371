"""Selections that ask clients for the loss of the shared model on their training examples.

power_of_choice: Y. J. Cho, J. Wang, G. Joshi, "Towards understanding biased client selection in
federated learning", AISTATS 2022, arXiv:2010.01243. The candidates are asked before the round:

    d candidates, drawn with probability n_k / sum n;   cohort = the m with the largest F_k(w_t)

oort: F. Lai, X. Zhu, H. V. Madhyastha, M. Chowdhury, "Oort: efficient federated learning via guided
participant selection", OSDI 2021, arXiv:2010.06081. The cohort is asked:

    U(k) = |B_k| (1/|B_k| sum_{x in B_k} loss(x)^2)^(1/2),   as k told in round L(k), its last one
    score(k) = (min(U(k), U_95) - min U) / (max U - min U) + (0.1 ln t / L(k))^(1/2)

In round t, a share e = max(0.9 0.98^t, 0.2) of the cohort is drawn from clients that never took
part; the others with probability in proportion to their score, from those whose score is at least
.95 of the score of the last one that fits in.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from feddkd.errors import InputError
from feddkd.rounds.selection.rule import SELECTIONS, Clients, Known, Selected, Selection, weighted
from feddkd.spec.types import Count, Momentum, Share

Numbers = npt.NDArray[np.float64]


@SELECTIONS.register
def power_of_choice(*, candidates: Count | None = None) -> Selection:
    """The candidates with the largest loss of the shared model; by default there are twice as many
    candidates as the cohort has clients.
    """

    def count(clients: int, cohort: int) -> int:
        return min(2 * cohort, clients) if candidates is None else candidates

    def check(clients: int, cohort: int) -> None:
        if not cohort <= count(clients, cohort) <= clients:
            raise InputError(
                f"selection 'power_of_choice': candidates must be from {cohort}, the size of a"
                f" cohort, to {clients}, the number of clients; not {candidates}"
            )

    def draw(known: Known) -> Clients:
        asked = count(len(known.sizes), known.cohort)
        return weighted(known.random, np.asarray(known.sizes), asked)

    def decide(known: Known, drawn: Clients, told: Mapping[int, float]) -> Selected:
        losses = [told.get(int(client), -np.inf) for client in drawn]
        best = np.lexsort((drawn, np.negative(losses)))  # ties: the lower number
        return Selected(drawn[best[: known.cohort]], known.notes)

    return Selection(draw, "mean loss", decide, check=check)


@SELECTIONS.register
def oort(
    *,
    exploration: Momentum = 0.9,
    decay: Share = 0.98,
    least: Momentum = 0.2,
    cutoff: Share = 0.95,
) -> Selection:
    """Clients with much to learn, and in a share of the cohort clients that are new. There is no
    clock, so all clients count as equally fast.
    """

    def draw(known: Known) -> Clients:
        share = max(exploration * decay**known.round, least)
        return _explore_and_exploit(known, share, cutoff)

    def decide(known: Known, drawn: Clients, told: Mapping[int, float]) -> Selected:
        utility, last = known.notes["utility"].copy(), known.notes["last"].copy()
        for client, value in told.items():
            utility[client], last[client] = value, known.round
        return Selected(drawn, {"utility": utility, "last": last})

    return Selection(draw, "utility", decide, keeps=("utility", "last"))


def _explore_and_exploit(known: Known, share: float, cutoff: float) -> Clients:
    """Return the cohort: clients with high scores, and clients without one."""
    random, last = known.random, known.notes["last"]
    scored, new = np.flatnonzero(last > 0), np.flatnonzero(last == 0)
    exploited = min(int(known.cohort * (1 - share)), len(scored))
    exploited = max(exploited, known.cohort - len(new))
    explored = random.choice(new, size=known.cohort - exploited, replace=False)
    if not exploited:
        return explored
    scores = score(known.notes["utility"][scored], last[scored], known.round)
    border = cutoff * np.sort(scores)[-exploited]
    pool = np.flatnonzero(scores >= border)
    chosen = weighted(random, np.maximum(scores[pool], 1e-12), exploited)
    return np.concatenate([scored[pool[chosen]], explored])


def score(utility: Numbers, last: Numbers, round: int) -> Numbers:
    """Return the scores of clients that have taken part."""
    width = np.ptp(utility) or 1.0
    gain: Numbers = (np.minimum(utility, np.quantile(utility, 0.95)) - utility.min()) / width
    uncertainty: Numbers = np.sqrt(0.1 * np.log(round) / last)
    return gain + uncertainty
