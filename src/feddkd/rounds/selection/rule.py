"""The value `Selection`, and the rules that need no answers of clients.

A selection is a pure function of the run's seed, the round and what the server knows, so a cohort
is the same on every engine and after a resumption. `cohort` says how many clients are selected.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from feddkd.errors import InputError, choices
from feddkd.method import Method
from feddkd.randomness import generator
from feddkd.spec.number_lists import numbers_in
from feddkd.spec.registry import Registry, Spelled

Clients = npt.NDArray[np.int64]
Notes = Mapping[str, npt.NDArray[np.float64]]
Statistic = Literal["mean loss", "utility"]


class Known(NamedTuple):
    """Facts that the server knows when it selects."""

    seed: int
    round: int
    sizes: Sequence[int]  # the number of training examples of each client
    cohort: int  # how many clients to select
    notes: Notes  # one number for each client under each name, from earlier rounds

    @property
    def random(self) -> np.random.Generator:
        """A generator for the draws of this round."""
        return generator(("cohort", self.seed, self.round))


class Selected(NamedTuple):
    """The cohort, and what the server notes for later rounds."""

    cohort: Clients
    notes: Notes


def as_drawn(known: Known, drawn: Clients, told: Mapping[int, float]) -> Selected:
    """Return the clients that were drawn as the cohort."""
    return Selected(drawn, known.notes)


@dataclass(frozen=True, eq=False)
class Selection(Spelled):
    """A rule that selects the cohort of a round. A rule that asks sends the shared model first."""

    draw: Callable[[Known], Clients]  # the cohort, or the clients that are asked
    asks: Statistic | None = None  # what each of them tells
    # (known, clients that were asked, what those that answered told) -> cohort
    decide: Callable[[Known, Clients, Mapping[int, float]], Selected] = as_drawn
    keeps: tuple[str, ...] = ()  # names of the notes; they begin with zeros
    check: Callable[[int, int], None] = lambda clients, cohort: None  # may raise InputError

    def check_fits(self, method: Method, clients: int, cohort: int) -> None:
        """Raise InputError if this rule does not go with the method or the federation."""
        self.check(clients, cohort)
        if self != UNIFORM and any(phase.noise for phase in method.phases):
            raise InputError(
                f"selection {str(self)!r} does not go with noise: the accountant of epsilon counts"
                " on cohorts that are drawn uniformly"
            )


SELECTIONS: Registry[Selection] = Registry("selection", "feddkd.selections")


def find_selection(given: object) -> Selection:
    """Return a selection by its text; raise InputError if there is none."""
    if isinstance(given, Selection):
        return given
    if not isinstance(given, str):
        raise InputError(
            "selection must be a text, such as 'power_of_choice(candidates=20)', not"
            f" {type(given).__name__}; there are: {choices(SELECTIONS)}"
        )
    return SELECTIONS.one(given)


@SELECTIONS.register
def uniform() -> Selection:
    """All cohorts are equally probable."""

    def draw(known: Known) -> Clients:
        return known.random.choice(len(known.sizes), size=known.cohort, replace=False)

    return Selection(draw)


@SELECTIONS.register
def by_size() -> Selection:
    """Clients are drawn one after another, without replacement, with probability n_k / sum n."""
    return Selection(lambda known: weighted(known.random, np.asarray(known.sizes), known.cohort))


@SELECTIONS.register
def round_robin() -> Selection:
    """All clients in turn, in an order that the seed draws once."""

    def draw(known: Known) -> Clients:
        clients = len(known.sizes)
        order = generator(("turns", known.seed)).permutation(clients)
        places = (known.round - 1) * known.cohort + np.arange(known.cohort)
        return order[places % clients]

    return Selection(draw)


@SELECTIONS.register
def by_group(*, groups: str) -> Selection:
    """The same number from each group, uniformly; clients that are left over go to the groups in
    turn. Groups are lists of numbers: "0-4; 5, 7-9".
    """
    listed = [numbers_in(part, "selection 'by_group': groups") for part in groups.split(";")]
    members = [number for group in listed for number in group]

    def check(clients: int, cohort: int) -> None:
        if sorted(members) != list(range(clients)):
            raise InputError(
                f"selection 'by_group': groups must name each of the clients 0 to {clients - 1}"
                f" once, not {groups!r}"
            )
        least = min(map(len, listed))
        if -(-cohort // len(listed)) > least:
            raise InputError(
                f"selection 'by_group': a cohort of {cohort} needs"
                f" {-(-cohort // len(listed))} clients of each group, and one has {least}"
            )

    def draw(known: Known) -> Clients:
        each, more = divmod(known.cohort, len(listed))
        random, drawn = known.random, []
        for number, group in enumerate(listed):
            turn = (number - (known.round - 1) * more) % len(listed)
            drawn.append(random.choice(group, size=each + (turn < more), replace=False))
        return np.concatenate(drawn)

    return Selection(draw, check=check)


def weighted(random: np.random.Generator, weights: npt.NDArray[Any], count: int) -> Clients:
    """Return positions drawn one after another without replacement, with probabilities in
    proportion to the weights of those that are left. Weights of 0 come last.

    The first of exponential waiting times with these rates are such a draw.
    """
    with np.errstate(divide="ignore"):
        waiting = random.exponential(size=len(weights)) / weights
    return np.argsort(waiting, kind="stable")[:count]


UNIFORM = uniform()
