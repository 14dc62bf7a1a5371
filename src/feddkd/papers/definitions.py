"""A paper as a folder:

tables.toml (what stands behind each table), published.csv (its printed cells), files of
experiments.
"""

import csv
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from feddkd.errors import InputError, choices
from feddkd.experiment import Experiment, load
from feddkd.methods import parse
from feddkd.rounds.loop import Row
from feddkd.spec.registry import Call


class PrintedCell(NamedTuple):
    """Where a printed cell stands."""

    table: str
    method: str
    setting: str
    quantity: str


@dataclass(frozen=True)
class Printed:
    """A cell as it was printed: texts, since their digits say how far they were rounded."""

    mean: str
    std: str
    note: str = ""
    runs: int | None = None  # that it rests on, where that is known

    def __str__(self) -> str:
        return f"{self.mean} ± {self.std}"

    @property
    def slack(self) -> float:
        """How far from the mean still is the printed spread: the deviation, and half a unit of the
        last digit.
        """
        decimals = len(self.mean.partition(".")[2])
        return float(self.std) + 0.5 * 10.0**-decimals


@dataclass(frozen=True)
class Quantity:
    """How a number is read off a run: which rounds, which number of their rows, in which unit."""

    at: str
    column: str
    scale: float = 1.0
    decimals: int = 0
    better: str = "neither"  # or "higher", "lower"
    of: Sequence[int] = ()  # where the number is a list: the mean of these

    def read(self, row: Row) -> float:
        """Dots lead into a row's parts, as in diagnostics.global_loss."""
        value: Any = row
        for part in self.column.split("."):
            value = value[part]
        return self.scale * (fmean(value[at] for at in self.of) if self.of else value)


@dataclass(frozen=True)
class Line:
    """A method of a table: calls that an experiment's method must have, and how many of its rounds
    count.
    """

    method: str
    rounds: int | None = None

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        return parse(self.method).calls

    def fits(self, experiment: Experiment) -> bool:
        found = experiment.parsed_method.calls
        return len(self.calls) == len(found) and all(
            one.name == other.name and set(one.given) <= set(other.complete)
            for one, other in zip(self.calls, found, strict=True)
        )


@dataclass(frozen=True)
class Column:
    """A column of a table: a file of experiments, and what must hold of those meant."""

    file: str
    where: Mapping[str, Any] = field(default_factory=dict)

    def fits(self, experiment: Experiment) -> bool:
        return replace(experiment, **self.where).digest == experiment.digest


@dataclass(frozen=True)
class Definition:
    """A table: its columns, rows and numbers."""

    name: str
    title: str
    lead: str
    tested: tuple[str, ...]
    settings: Mapping[str, Column]
    methods: Mapping[str, Line]
    quantities: Mapping[str, Quantity]
    note: str = ""
    # tables whose printed cells it is held against, too: another reading of what they show
    beside: tuple[str, ...] = ()

    @property
    def whole(self) -> list[str]:
        """Its methods but those that are first parts of others."""
        return [method for method, line in self.methods.items() if line.rounds == self.most()]

    def most(self, methods: Iterable[str] | None = None) -> int | None:
        """How many rounds of a run its methods, or some of them, count; None: all."""
        counted = [self.methods[method].rounds for method in methods or self.methods]
        return max((rounds for rounds in counted if rounds), default=None) if all(counted) else None


@dataclass(frozen=True)
class Paper:
    """A paper's folder, read."""

    folder: Path
    tables: Mapping[str, Definition]
    printed: Mapping[PrintedCell, Printed]

    @cached_property
    def experiments(self) -> dict[str, list[Experiment]]:
        """By file, each file once."""
        files = dict.fromkeys(
            setting.file for table in self.tables.values() for setting in table.settings.values()
        )
        return {file: load(self.folder / file) for file in files}

    def table(self, name: str) -> Definition:
        if name not in self.tables:
            raise InputError(f"the paper has no table {name!r}; there are: {choices(self.tables)}")
        return self.tables[name]

    def cell(self, table: Definition, place: PrintedCell) -> Printed | None:
        """What was printed there: in the table itself, or in one that it stands beside."""
        names = (table.name, *table.beside)
        return next(
            (
                self.printed[at]
                for name in names
                if (at := place._replace(table=name)) in self.printed
            ),
            None,
        )

    def behind(self, table: Definition, setting: str, method: str) -> list[Experiment]:
        """The experiments that a cell rests on: one for each seed."""
        column, line = table.settings[setting], table.methods[method]
        return [one for one in self.experiments[column.file] if line.fits(one) and column.fits(one)]

    def wanted(
        self, table: Definition, settings: list[str] | None = None, methods: list[str] | None = None
    ) -> list[Experiment]:
        """All experiments of a table, or of some settings and methods of it, each once."""
        for kind, names, known in (
            ("setting", settings, table.settings),
            ("method", methods, table.methods),
        ):
            for name in names or ():
                if name not in known:
                    raise InputError(
                        f"table {table.name!r} has no {kind} {name!r}; there are: {choices(known)}"
                    )
        found = [
            one
            for setting in settings or table.settings
            for method in methods or table.methods
            for one in self.behind(table, setting, method)
        ]
        return list({one.digest: one for one in found}.values())


def read(folder: Path) -> Paper:
    """The paper in a folder."""
    file = folder / "tables.toml"
    if not file.exists():
        raise InputError(
            f"there is no {file}; the paper's files lie in the repository under papers/feddkd: say"
            " where by --papers"
        )
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
        paper = Paper(
            folder,
            {name: _definition(name, table) for name, table in tables.items()},
            _cells(folder / "published.csv"),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"the paper in {folder} cannot be read: {error!r}") from None
    for table in paper.tables.values():
        for name in table.beside:
            paper.table(name)  # complain now
    return paper


def _definition(name: str, table: Mapping[str, Any]) -> Definition:
    parts = {
        "tested": tuple(table["tested"]),
        "beside": tuple(table.get("beside", ())),
        "settings": {key: Column(**value) for key, value in table["settings"].items()},
        "methods": {key: Line(**value) for key, value in table["methods"].items()},
        "quantities": {key: Quantity(**value) for key, value in table["quantities"].items()},
    }
    return Definition(**{"name": name, **table, **parts})


def _printed(row: Mapping[str, str]) -> Printed:
    return Printed(row["mean"], row["std"], row["note"], int(row["runs"]) if row["runs"] else None)


def _cells(file: Path) -> dict[PrintedCell, Printed]:
    with file.open(encoding="utf-8", newline="") as lines:
        return {
            PrintedCell(row["table"], row["method"], row["setting"], row["quantity"]): _printed(row)
            for row in csv.DictReader(lines)
        }
