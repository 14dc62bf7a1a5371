"""Runs -> the cells of a table, each beside the printed one, with a verdict; and whether methods
stand in the printed order.
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
from feddkd.runs.summary import mean_and_std

NOTHING, PARTIAL, UNPRINTED, WITHIN = (
    "nothing yet",
    "partial",
    "not printed",
    "within the printed spread",
)


def _best_validation(rows: Sequence[Row], target: float | None) -> list[Row]:
    # max keeps the first of equals: the earliest round
    return [max(rows, key=lambda row: row["validation_accuracy"])]


def _target(rows: Sequence[Row], target: float | None) -> list[Row]:
    return [row for row in rows if target is not None and row["test_accuracy"] >= target][:1]


def _five_best(rows: Sequence[Row], target: float | None) -> list[Row]:
    return sorted(rows, key=lambda row: -row["test_accuracy"])[:5]


def _best(rows: Sequence[Row], target: float | None) -> list[Row]:
    return _five_best(rows, target)[:1]


def _last(rows: Sequence[Row], target: float | None) -> list[Row]:
    return list(rows[-1:])


AT: Mapping[str, Callable[[Sequence[Row], float | None], list[Row]]] = {
    "best_validation": _best_validation,
    "target": _target,
    "five_best": _five_best,
    "best": _best,
    "last": _last,
}


@dataclass(frozen=True)
class RunValues:
    """What one run says to a cell."""

    seed: int
    values: list[float]  # none: the target was not reached
    rounds: int  # that it rests on
    settled: bool  # more rounds would not change it, or cannot be had
    broke_off: bool = False  # the run could not go on


@dataclass(frozen=True)
class Cell:
    """A cell of a table: what was printed, and what our runs say so far."""

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
        """Mean and population standard deviation; over the runs that reached the target, where
        there is one.
        """
        return mean_and_std(self.values) if self.values else None

    @property
    def difference(self) -> float | None:
        return (
            None
            if self.ours is None or self.printed is None
            else self.ours[0] - float(self.printed.mean)
        )

    @property
    def rounds(self) -> int:
        return sum(reading.rounds for reading in self.readings)

    @property
    def settled(self) -> bool:
        """No run is there in part; there may be fewer of them than wanted."""
        return all(reading.settled for reading in self.readings)

    @property
    def complete(self) -> bool:
        return self.settled and len(self.readings) == self.runs_wanted

    @property
    def missed(self) -> int:
        """Whole runs that never reached the target."""
        return sum(reading.settled and not reading.values for reading in self.readings)

    @property
    def broke_off(self) -> int:
        """Runs that could not go on; they count as they stand."""
        return sum(reading.broke_off for reading in self.readings)

    @property
    def by_seed(self) -> dict[int, float]:
        """One number a seed, of the runs that are settled."""
        return {
            one.seed: math.fsum(one.values) / len(one.values)
            for one in self.readings
            if one.settled and one.values
        }

    @property
    def chance(self) -> float | None:
        """How likely ours and the printed cell would lie so far apart by chance; None where one of
        the two is not known whole.
        """
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
        """How what there is compares with the printed cell."""
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
    """All cells of a table, quantity by quantity, setting by setting."""
    lines = {
        (setting, method): paper.behind(table, setting, method)
        for setting in table.settings
        for method in table.methods
    }
    # not every method is in every column
    behind = {line: experiments for line, experiments in lines.items() if experiments}
    for name in (*table.settings, *table.methods):
        if not any(name in line for line in behind):
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
        _reading(runs[one.digest], one, quantity, most) for one in behind if one.digest in runs
    ]
    furthest = max((reading.rounds for reading in readings), default=0)
    # no mean over long and short runs
    level = [reading for reading in readings if reading.settled or reading.rounds == furthest]
    rounds = sum(one.length(most) for one in behind)
    return Cell(place, quantity, paper.cell(table, place), level, len(behind), rounds)


def _reading(
    run: RecordedRun, experiment: Experiment, quantity: Quantity, most: int | None
) -> RunValues:
    """The target is the wanted experiment's: it changes no number of a run, so the run may have
    been told another.
    """
    rows, whole = run.rounds[:most], experiment.length(most)
    found = AT[quantity.at](rows, experiment.target)
    settled = run.reaches(whole) or (quantity.at == "target" and bool(found))
    values = [quantity.read(row) for row in found]
    return RunValues(
        experiment.seed, values, len(rows), settled, broke_off=run.broke_off and len(rows) < whole
    )


@dataclass(frozen=True)
class MethodOrder:
    """Whether the methods of a column stand in the printed order."""

    setting: str
    quantity: str
    pairs: int
    swapped: list[tuple[str, str]]  # printed: the first is better than the second; ours: it is not
    complete: bool

    @property
    def holds(self) -> bool:
        return not self.swapped


def orders(table: Definition, found: Sequence[Cell]) -> list[MethodOrder]:
    """For each column with two cells to compare, and for each quantity in which better means
    something.
    """
    columns = [(setting, quantity) for quantity in table.quantities for setting in table.settings]
    made = [
        _order([cell for cell in found if (cell.place.setting, cell.place.quantity) == column])
        for column in columns
    ]
    return [order for order in made if order is not None]


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
    return (
        MethodOrder(place.setting, place.quantity, len(pairs), swapped, complete) if pairs else None
    )


def _sign(cell: Cell) -> int:
    return -1 if cell.quantity.better == "higher" else 1


def _printed_rank(cell: Cell) -> float:
    """Less is better."""
    return _sign(cell) * float(cell.printed.mean) if cell.printed is not None else math.inf


def _rank(cell: Cell) -> float:
    """Less is better; a target that was missed is worst of all."""
    return math.inf if cell.missed or cell.ours is None else _sign(cell) * cell.ours[0]
