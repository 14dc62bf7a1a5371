"""Availability: the clients that do not answer, and the rules of a run for them.

In an exchange a client may `drop`: it does not answer, and its memo does not change. Or it may be
`late`: it computes, and its memo changes, but its upload comes too late to count. In both cases it
is out for the rest of the round. Absences are decided by the loop over rounds, not by an engine, so
they are the same on every engine.
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
    """One line of a trace: a client that does not answer in repetition `step` of a phase."""

    round: Count
    client: Whole
    phase: str
    step: Count
    event: Event


@dataclass(frozen=True, eq=False)
class Availability(Spelled):
    """A rule that gives for each (seed, round, exchange, client) the absence of the client."""

    event: Callable[[int, int, Exchange, int], Event | None]
    identity: str = ""  # its text in digests, if that is not its spelling
    absences: tuple[Absence, ...] = ()  # all of them, if they were listed

    @property
    def canonical(self) -> str:
        return self.identity or super().canonical

    def check(self, method: Method, clients: int) -> None:
        """Raise InputError if a listed absence names a phase or a client that does not exist."""
        names = dict.fromkeys(phase.name for phase in method.phases if phase.asks_clients)
        for absence in self.absences:
            if absence.phase not in names:
                raise InputError(
                    f"availability: no phase {absence.phase!r} asks clients; phases that do:"
                    f" {', '.join(names)}"
                )
            if absence.client >= clients:
                raise InputError(
                    f"availability: there is no client {absence.client}; clients have numbers"
                    f" from 0 to {clients - 1}"
                )


AVAILABILITIES: Registry[Availability] = Registry("availability", "feddkd.availabilities")


@AVAILABILITIES.register
def always() -> Availability:
    """All clients answer."""
    return Availability(lambda seed, t, exchange, client: None)


@AVAILABILITIES.register
def random(
    *, drop: Probability = 0.1, late: Probability = 0.0, seed: Whole | None = None
) -> Availability:
    """In each exchange a client drops out or is late with these probabilities. They are drawn by
    the run's seed unless `seed` is given.
    """
    if drop + late > 1:
        raise InputError(
            f"availability 'random': drop and late are {drop + late:g} together; their sum can be"
            " at most 1"
        )

    def event(run_seed: int, t: int, exchange: Exchange, client: int) -> Event | None:
        used = run_seed if seed is None else seed
        drawn = generator(("availability", used, t, exchange.index, exchange.step, client)).random()
        if drawn < drop:
            return "drop"
        return "late" if drawn < drop + late else None

    return Availability(event)


@AVAILABILITIES.register
def trace(*, file: str) -> Availability:
    """Absences are listed in a CSV file: round, client, phase, step, event (drop or late). Digests
    depend on the content of the file, not on its name.
    """
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
        lines = list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
    except (OSError, ValueError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read the availability trace {file}: {reason}") from None
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
    """Return the values of one line, digits as numbers; nothing else is checked."""
    if None in line or None in line.values():
        raise InputError(f"line {number} does not have one value for each column")
    values: dict[str, Any] = {str(name).strip(): value.strip() for name, value in line.items()}
    for name in ("round", "client", "step"):
        if values[name].isdecimal():
            values[name] = int(values[name])
    return tuple(values[name] for name in Absence._fields)


def listed(rows: Iterable[Sequence[Any]]) -> Availability:
    """Return the rule of a list of absences (round, client, phase, step, event), such as
    (1, 0, "distil", 2, "drop").
    """
    hints = typing.get_type_hints(Absence, include_extras=True)
    events: dict[tuple[Any, ...], Absence] = {}
    for row in rows:
        if len(row) != len(hints):
            raise InputError(f"an absence is ({', '.join(hints)}), not {tuple(row)!r}")
        pairs = zip(hints, row, strict=True)
        absence = Absence(
            *(checked(value, hints[name], f"availability: {name}") for name, value in pairs)
        )
        if absence[:-1] in events:
            raise InputError(f"availability: {absence[:-1]} is listed twice")
        events[absence[:-1]] = absence

    def event(seed: int, t: int, exchange: Exchange, client: int) -> Event | None:
        absence = events.get((t, client, exchange.phase.name, exchange.step))
        return absence.event if absence else None

    ordered = tuple(sorted(events.values()))
    digest = hashlib.sha256(repr([tuple(absence) for absence in ordered]).encode()).hexdigest()
    return Availability(event, f"trace(digest={digest!r})", ordered)


ALWAYS = always()


@dataclass(frozen=True)
class Tolerance:
    """The rules of a run for clients that fail."""

    availability: Availability = ALWAYS
    min_clients: int = 1  # with fewer left, a round ends and the state does not change
    # a client whose numbers are not finite is left out, or stops the run, or is not looked for
    on_divergence: OnDivergence = "drop"


def tolerance(availability: str | Availability, min_clients: Any, on_divergence: Any) -> Tolerance:
    """Return the tolerance with these values; raise InputError if one of them is wrong."""
    if not isinstance(availability, str | Availability):
        raise InputError(
            "availability must be a text, such as 'random(drop=0.1)', or listed(rows), not"
            f" {type(availability).__name__}; there are: {choices(AVAILABILITIES)}"
        )
    if isinstance(availability, str):
        availability = AVAILABILITIES.one(availability)
    return Tolerance(
        availability,
        checked(min_clients, Count, "min_clients"),
        checked(on_divergence, OnDivergence, "on_divergence"),
    )
