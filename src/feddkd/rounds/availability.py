"""Who answers and who does not, and what a run puts up with.

In an exchange a client may `drop`: it was asked and never answers, so what it holds stays as it
was. Or it may be `late`: it computes, and what it holds moves on, but its upload comes when nobody
waits any more. Either way it is out for the rest of the round. Absences are decided by the loop
over rounds, not by an engine, so every engine replays the same.
"""

import csv
import hashlib
import io
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from feddkd.errors import InputError, choices
from feddkd.method import Exchange, Method
from feddkd.randomness import generator
from feddkd.spec.registry import Registry, Spelled
from feddkd.spec.types import Bound, Count, Whole, checked

Event = Literal["drop", "late"]
OnDivergence = Literal["drop", "stop", "continue"]
Probability = Annotated[float, Bound(least=0, most=1)]


class Absence(NamedTuple):
    """One line of a trace: in repetition `step` of the phase of this name, in this round, this
    client does not answer.
    """

    round: Count
    client: Whole
    phase: str
    step: Count
    event: Event


@dataclass(frozen=True, eq=False)
class Availability(Spelled):
    """A rule that says for each (seed, round, exchange, client) whether the client fails to answer,
    and how.
    """

    event: Callable[[int, int, Exchange, int], Event | None]
    identity: str = ""  # what it is called in digests, where that is not its spelling
    absences: tuple[Absence, ...] = ()  # all of them, where they were listed

    @property
    def canonical(self) -> str:
        return self.identity or super().canonical

    def check(self, method: Method, clients: int) -> None:
        """A listed absence that can never come to pass is a slip of the pen."""
        names = dict.fromkeys(phase.name for phase in method.phases if phase.asks_clients)
        for absence in self.absences:
            if absence.phase not in names:
                raise InputError(
                    f"availability: no clients are asked in a phase {absence.phase!r}; phases:"
                    f" {', '.join(names)}"
                )
            if absence.client >= clients:
                raise InputError(
                    f"availability: there is no client {absence.client}; they go from 0 to"
                    f" {clients - 1}"
                )


AVAILABILITIES: Registry[Availability] = Registry("availability", "feddkd.availabilities")


@AVAILABILITIES.register
def always() -> Availability:
    """Whoever is asked answers."""
    return Availability(lambda seed, t, exchange, client: None)


@AVAILABILITIES.register
def random(
    *, drop: Probability = 0.1, late: Probability = 0.0, seed: Whole | None = None
) -> Availability:
    """In each exchange a client drops out or is late with these probabilities, by the run's seed
    unless one is given.
    """
    if drop + late > 1:
        raise InputError(
            f"availability 'random': drop and late are {drop + late:g} together, and may be 1 at"
            " most"
        )

    def event(own: int, t: int, exchange: Exchange, client: int) -> Event | None:
        key = (
            "availability",
            own if seed is None else seed,
            t,
            exchange.index,
            exchange.step,
            client,
        )
        drawn = generator(key).random()
        return "drop" if drawn < drop else "late" if drawn < drop + late else None

    return Availability(event)


@AVAILABILITIES.register
def trace(*, file: str) -> Availability:
    """Absences listed in a CSV file: round, client, phase, step, event (drop or late). It is known
    by what it holds.
    """
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
        lines = list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(
            f"cannot read the availability trace {file}:"
            f" {getattr(error, 'strerror', None) or error}"
        ) from None
    header = text.splitlines()[0] if text else ""
    if sorted(name.strip() for name in header.split(",")) != sorted(Absence._fields):
        raise InputError(
            f"{file}: the first line must name the columns {','.join(Absence._fields)}, not"
            f" {header[:200]!r}"
        )
    try:
        return listed(_read(line, number) for number, line in enumerate(lines, 2))
    except InputError as error:
        raise InputError(f"{file}: {error}") from None


def _read(line: Mapping[str | None, Any], number: int) -> tuple[Any, ...]:
    """A line of the file; numbers are still to be checked."""
    if None in line or None in line.values():
        raise InputError(f"line {number} has not as many values as there are columns")
    values = {str(name).strip(): value.strip() for name, value in line.items()}
    whole = {
        name: int(values[name]) if values[name].isdecimal() else values[name]
        for name in ("round", "client", "step")
    }
    return tuple({**values, **whole}[name] for name in Absence._fields)


def listed(rows: Iterable[Sequence[Any]]) -> Availability:
    """The absences of a list, each (round, client, phase, step, event), as in (1, 0, "distil", 2,
    "drop").
    """
    hints = typing.get_type_hints(Absence, include_extras=True)
    events: dict[tuple[Any, ...], Absence] = {}
    for row in rows:
        if len(row) != len(hints):
            raise InputError(f"an absence is ({', '.join(hints)}), not {tuple(row)!r}")
        absence = Absence(
            *(
                checked(value, hints[name], f"availability: {name}")
                for name, value in zip(hints, row, strict=True)
            )
        )
        if absence[:-1] in events:
            raise InputError(f"availability: {absence[:-1]} is listed twice")
        events[absence[:-1]] = absence

    def event(seed: int, t: int, exchange: Exchange, client: int) -> Event | None:
        found = events.get((t, client, exchange.phase.name, exchange.step))
        return found.event if found else None

    ordered = tuple(sorted(events.values()))
    digest = hashlib.sha256(repr([tuple(absence) for absence in ordered]).encode()).hexdigest()
    return Availability(event, f"trace(digest={digest!r})", ordered)


ALWAYS = always()


@dataclass(frozen=True)
class Tolerance:
    """What a run puts up with."""

    availability: Availability = ALWAYS
    min_clients: int = 1  # with fewer left a round ends, and what stood before is kept
    # a client whose numbers are not finite is left out, or ends the run, or nobody looks
    on_divergence: OnDivergence = "drop"


def tolerance(availability: str | Availability, min_clients: Any, on_divergence: Any) -> Tolerance:
    """From what somebody wrote down."""
    if not isinstance(availability, str | Availability):
        raise InputError(
            "availability must be a text, such as 'random(drop=0.1)', or listed(rows), not"
            f" {type(availability).__name__}; there are: {choices(AVAILABILITIES)}"
        )
    return Tolerance(
        AVAILABILITIES.one(availability) if isinstance(availability, str) else availability,
        checked(min_clients, Count, "min_clients"),
        checked(on_divergence, OnDivergence, "on_divergence"),
    )
