"""Makes the cells of a table from runs and compares each with the printed cell.

Also compares the order of the methods with the printed order.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from feddkd.errors import InputError
from feddkd.experiment import Experiment
from feddkd.papers.definitions import Definition, Paper, Printed, PrintedCell, Quantity
from feddkd.papers.results import RecordedRun, Runs
from feddkd.reports.statistics import apart
from feddkd.rounds.loop import Row
from feddkd.rounds.metrics import ACCURACY, read_target
from feddkd.runs.summary import mean_and_std

NOTHING, PARTIAL, UNPRINTED, WITHIN = (
    "nothing yet",
    "partial",
    "not printed",
    "within the printed spread",
)


Goal = float | str | None  # the target of an experiment


def _best_validation(rows: Sequence[Row], target: Goal) -> list[Row]:
    # max keeps the first of equals: the earliest round
    return [max(rows, key=lambda row: row["validation_accuracy"])]


def _target(rows: Sequence[Row], target: Goal) -> list[Row]:
    if target is None:
        return []
    return list(filter(read_target(target, ACCURACY).is_reached, rows))[:1]


def _five_best(rows: Sequence[Row], target: Goal) -> list[Row]:
    return sorted(rows, key=lambda row: -row["test_accuracy"])[:5]


AT: Mapping[str, Callable[[Sequence[Row], Goal], list[Row]]] = {
    "best_validation": _best_validation,
    "target": _target,
    "five_best": _five_best,
    "best": lambda rows, target: _five_best(rows, target)[:1],
    "last": lambda rows, target: list(rows[-1:]),
}


@dataclass(frozen=True)
class RunValues:
    """The values of one run for a cell."""

    seed: int
    values: list[float]  # empty: the target was not reached
    rounds: int  # the rounds that the values are based on
    settled: bool  # further rounds would not change the values, or the run has ended
    broke_off: bool = False  # the run ended early, by an error


@dataclass(frozen=True)
class Cell:
    """A cell of a table: the printed numbers, and the numbers of our runs so far."""

    place: PrintedCell
    quantity: Quantity
    printed: Printed | None
    readings: list[RunValues]
    runs_wanted: int
    rounds_wanted: int

    @property
    def values(self) -> list[float]:
        return [value for reading in self.readings for value in reading.values]

    @property
    def ours(self) -> tuple[float, float] | None:
        """Mean and population standard deviation; with a target, of the runs that reached it."""
        return mean_and_std(self.values) if self.values else None

    @property
    def difference(self) -> float | None:
        if self.ours is None or self.printed is None:
            return None
        return self.ours[0] - float(self.printed.mean)

    @property
    def rounds(self) -> int:
        return sum(reading.rounds for reading in self.readings)

    @property
    def settled(self) -> bool:
        """True if no run is unfinished; there may be fewer runs than wanted."""
        return all(reading.settled for reading in self.readings)

    @property
    def complete(self) -> bool:
        return self.settled and len(self.readings) == self.runs_wanted

    @property
    def missed(self) -> int:
        """Number of finished runs that never reached the target."""
        return sum(reading.settled and not reading.values for reading in self.readings)

    @property
    def broke_off(self) -> int:
        """Number of runs that ended early by an error; their rounds count."""
        return sum(reading.broke_off for reading in self.readings)

    @property
    def by_seed(self) -> dict[int, float]:
        """One number for each seed whose run is settled."""
        return {
            reading.seed: math.fsum(reading.values) / len(reading.values)
            for reading in self.readings
            if reading.settled and reading.values
        }

    @property
    def chance(self) -> float | None:
        """The probability of a difference this large by chance; None if a cell is incomplete."""
        if self.printed is None or self.printed.runs is None or not self.complete or self.missed:
            return None
        return apart(
            list(self.by_seed.values()),
            float(self.printed.mean),
            float(self.printed.std),
            self.printed.runs,
        )

    @property
    def verdict(self) -> str:
        if not self.readings:
            return NOTHING
        return self.tendency if self.complete else PARTIAL

    @property
    def tendency(self) -> str:
        """The comparison of the runs so far with the printed cell, in words."""
        if self.printed is None:
            return UNPRINTED
        if self.missed:
            return "worse"
        if self.difference is None:
            return "not reached"
        if abs(self.difference) <= self.printed.slack:
            return WITHIN
        words = {
            "higher": ("worse", "better"),
            "lower": ("better", "worse"),
            "neither": ("below", "above"),
        }
        return words[self.quantity.better][self.difference > 0]


def cells(paper: Paper, table: Definition, runs: Runs) -> list[Cell]:
    """Return all cells of a table, ordered by quantity, then by setting."""
    behind = {}
    for setting in table.settings:
        for method in table.methods:
            experiments = paper.behind(table, setting, method)
            if experiments:  # not every method is in every column
                behind[setting, method] = experiments
    for name in (*table.settings, *table.methods):
        if not any(name in place for place in behind):
            raise InputError(f"table {table.name!r}: there are no experiments for {name!r}")
    places = [
        PrintedCell(table.name, method, setting, quantity)
        for quantity in table.quantities
        for setting, method in behind
    ]
    return [
        _cell(paper, table, place, behind[place.setting, place.method], runs) for place in places
    ]


def _cell(
    paper: Paper, table: Definition, place: PrintedCell, behind: Sequence[Experiment], runs: Runs
) -> Cell:
    quantity, most = table.quantities[place.quantity], table.methods[place.method].rounds
    readings = [
        _reading(runs[experiment.digest], experiment, quantity, most)
        for experiment in behind
        if experiment.digest in runs
    ]
    longest = max((reading.rounds for reading in readings), default=0)
    # a mean is taken over runs of the same length only
    level = [reading for reading in readings if reading.settled or reading.rounds == longest]
    rounds = sum(experiment.length(most) for experiment in behind)
    return Cell(place, quantity, paper.cell(table, place), level, len(behind), rounds)


def _reading(
    run: RecordedRun, experiment: Experiment, quantity: Quantity, most: int | None
) -> RunValues:
    """Return the values of a run for a quantity.

    The target is taken from the experiment, not from the run: it changes no number of a run, so the
    run may have had another target.
    """
    rows, length = run.rounds[:most], experiment.length(most)
    chosen = AT[quantity.at](rows, experiment.target)
    settled = run.reaches(length) or (quantity.at == "target" and bool(chosen))
    values = [quantity.read(row) for row in chosen]
    broke_off = run.broke_off and len(rows) < length
    return RunValues(experiment.seed, values, len(rows), settled, broke_off)


@dataclass(frozen=True)
class MethodOrder:
    """The order of a column's methods, compared with the printed order."""

    setting: str
    quantity: str
    pairs: int
    # pairs whose first method is better than the second in print, but not in our runs
    swapped: list[tuple[str, str]]
    complete: bool

    @property
    def holds(self) -> bool:
        return not self.swapped


def orders(table: Definition, compared: Sequence[Cell]) -> list[MethodOrder]:
    """Return the orders of all columns that have two cells to compare.

    Quantities that are neither better high nor better low have no order.
    """
    made = []
    for quantity in table.quantities:
        for setting in table.settings:
            column = (setting, quantity)
            order = _order(
                [cell for cell in compared if (cell.place.setting, cell.place.quantity) == column]
            )
            if order is not None:
                made.append(order)
    return made


def _order(column: Sequence[Cell]) -> MethodOrder | None:
    printed = [
        cell for cell in column if cell.printed is not None and cell.quantity.better != "neither"
    ]
    ranked = sorted((cell for cell in printed if cell.readings and cell.settled), key=_printed_rank)
    pairs = [
        (first, second)
        for first, second in combinations(ranked, 2)
        if _printed_rank(first) < _printed_rank(second)
    ]
    swapped = [(a.place.method, b.place.method) for a, b in pairs if not _rank(a) < _rank(b)]
    complete = all(cell.complete for cell in printed)
    place = column[0].place
    if not pairs:
        return None
    return MethodOrder(place.setting, place.quantity, len(pairs), swapped, complete)


def _sign(cell: Cell) -> int:
    return -1 if cell.quantity.better == "higher" else 1


def _printed_rank(cell: Cell) -> float:
    """Return a number that is smaller for a better printed cell."""
    return _sign(cell) * float(cell.printed.mean) if cell.printed is not None else math.inf


def _rank(cell: Cell) -> float:
    """Return a number that is smaller for a better cell; a missed target is the worst."""
    return math.inf if cell.missed or cell.ours is None else _sign(cell) * cell.ours[0]
