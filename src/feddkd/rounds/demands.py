"""The memory that a round needs, compared with the machine before the first round.

Each amount is less than what a round really needs, so a run that could be played is never refused.
"""

from collections.abc import Sequence

from feddkd.engines.memory import in_words
from feddkd.errors import InputError
from feddkd.method import Fold, Method, Phase
from feddkd.tensors import Tensors, bytes_of

# A round lists its exchanges before it begins, in some hundred bytes each.
MOST_EXCHANGES = 1_000_000
NUMBER = 8  # bytes of an example's number in a list of batches


def check_demands(
    method: Method, params: Tensors, cohort: int, sizes: Sequence[int], free: int | None
) -> None:
    """Raise InputError if a round has too many exchanges, or needs more than the free bytes.

    `method` is fitted to the network, `params` are what clients share, `sizes` the numbers of
    their examples.
    """
    exchanges = sum(phase.repeat.times for phase in method.phases)
    if exchanges > MOST_EXCHANGES:
        raise InputError(
            f"a round of {method} has {exchanges} exchanges; it can have {MOST_EXCHANGES}, since it"
            " lists them before it begins"
        )
    if free is None:
        return
    for phase in filter(lambda phase: phase.asks_clients, method.phases):
        _check(_lists(phase, max(sizes)), free, f"a client's batches in phase {phase.name!r}")
        _check(_models(phase, params, cohort), free, f"the models of a cohort of {cohort} clients")


def _check(needed: int, free: int, what: str) -> None:
    if needed > free:
        raise InputError(f"{what} need {in_words(needed)} of memory, and {in_words(free)} are free")


def _lists(phase: Phase, examples: int) -> int:
    """Return the least bytes that one client's list of batches takes."""
    return NUMBER * phase.reads.count(examples) if examples else 0


def _models(phase: Phase, params: Tensors, cohort: int) -> int:
    """Return the least bytes that the models of a cohort take while they are averaged."""
    if not isinstance(phase.client, Fold) or "params" not in phase.collect:
        return 0
    largest = max((tensor.numel() * tensor.element_size() for tensor in params.values()), default=0)
    return cohort * (bytes_of({"params": params}) + largest)
