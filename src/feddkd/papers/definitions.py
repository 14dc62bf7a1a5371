"""Reads a paper's folder: tables.toml (the experiments of each table), published.csv (the printed
cells) and files of experiments.
"""

import csv
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from feddkd.errors import InputError, unknown
from feddkd.experiment import Experiment, load
from feddkd.methods import parse
from feddkd.rounds.loop import Row
from feddkd.spec.registry import Call


class PrintedCell(NamedTuple):
    """The place of a printed cell."""

    table: str
    method: str
    setting: str
    quantity: str


@dataclass(frozen=True)
class Printed:
    """A printed cell; the numbers are texts, because their digits show how they were rounded."""

    mean: str
    std: str
    note: str = ""
    runs: int | None = None  # the number of runs that it is based on, if known

    def __str__(self) -> str:
        return f"{self.mean} ± {self.std}"

    @property
    def slack(self) -> float:
        """The width of the printed spread: the deviation, and half a unit of the last digit."""
        decimals = len(self.mean.partition(".")[2])
        return float(self.std) + 0.5 * 10.0**-decimals


@dataclass(frozen=True)
class Quantity:
    """A number of a run: the rounds it is taken from, the column of their rows, and the unit."""

    at: str
    column: str
    scale: float = 1.0
    decimals: int = 0
    better: str = "neither"  # or "higher", "lower"
    of: Sequence[int] = ()  # if the column holds a list: the mean of these elements

    def read(self, row: Row) -> float:
        """Return the number in a row; dots lead to its parts, as in diagnostics.global_loss."""
        value: Any = row
        for part in self.column.split("."):
            value = value[part]
        return self.scale * (fmean(value[at] for at in self.of) if self.of else value)


@dataclass(frozen=True)
class Line:
    """A method of a table: the calls that an experiment's method must have, or the name that the
    experiment has in its file; and how many rounds of it count.
    """

    method: str = ""
    rounds: int | None = None
    name: str = ""

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        return parse(self.method).calls

    def fits(self, experiment: Experiment) -> bool:
        """Return True if an experiment has the name, or the calls with these options."""
        if self.name:
            return experiment.name == self.name
        calls = experiment.parsed_method.calls
        return len(self.calls) == len(calls) and all(
            wanted.name == call.name and set(wanted.given) <= set(call.complete)
            for wanted, call in zip(self.calls, calls, strict=True)
        )


@dataclass(frozen=True)
class PaperColumn:
    """A column of a table: a file of experiments, and the keys that select some of them."""

    file: str
    where: Mapping[str, Any] = field(default_factory=dict)

    def fits(self, experiment: Experiment) -> bool:
        """Return True if an experiment has these keys."""
        return replace(experiment, **self.where).digest == experiment.digest


@dataclass(frozen=True)
class Definition:
    """A table: its columns, rows and numbers."""

    name: str
    title: str
    lead: str
    tested: tuple[str, ...]
    settings: Mapping[str, PaperColumn]
    methods: Mapping[str, Line]
    quantities: Mapping[str, Quantity]
    note: str = ""
    # other tables whose printed cells it is compared with: another way to read the same runs
    beside: tuple[str, ...] = ()

    @property
    def whole(self) -> list[str]:
        """The methods except those that are the first rounds of others."""
        return [method for method, line in self.methods.items() if line.rounds == self.most()]

    def most(self, methods: Iterable[str] | None = None) -> int | None:
        """Return the most rounds of a run that these methods use (default: all methods).

        None means all rounds.
        """
        counted = [self.methods[method].rounds for method in methods or self.methods]
        return max((rounds for rounds in counted if rounds), default=None) if all(counted) else None


@dataclass(frozen=True)
class Paper:
    """The content of a paper's folder."""

    folder: Path
    tables: Mapping[str, Definition]
    printed: Mapping[PrintedCell, Printed]

    @cached_property
    def experiments(self) -> dict[str, list[Experiment]]:
        """The experiments of each file."""
        files = dict.fromkeys(
            setting.file for table in self.tables.values() for setting in table.settings.values()
        )
        return {file: load(self.folder / file) for file in files}

    def table(self, name: str) -> Definition:
        """Return a table, or raise InputError if there is none of that name."""
        if name not in self.tables:
            raise unknown(f"the paper has no table {name!r}", name, self.tables)
        return self.tables[name]

    def cell(self, table: Definition, place: PrintedCell) -> Printed | None:
        """Return the printed cell of the table, or of another table that it is compared with."""
        for name in (table.name, *table.beside):
            printed = self.printed.get(place._replace(table=name))
            if printed is not None:
                return printed
        return None

    def behind(self, table: Definition, setting: str, method: str) -> list[Experiment]:
        """Return the experiments of a cell, one for each seed."""
        column, line = table.settings[setting], table.methods[method]
        return [
            experiment
            for experiment in self.experiments[column.file]
            if line.fits(experiment) and column.fits(experiment)
        ]

    def wanted(
        self, table: Definition, settings: list[str] | None = None, methods: list[str] | None = None
    ) -> list[Experiment]:
        """Return the experiments of a table, or of some settings and methods, each once."""
        for kind, names, known in (
            ("setting", settings, table.settings),
            ("method", methods, table.methods),
        ):
            for name in names or ():
                if name not in known:
                    raise unknown(f"table {table.name!r} has no {kind} {name!r}", name, known)
        by_digest = {}
        for setting in settings or table.settings:
            for method in methods or table.methods:
                for experiment in self.behind(table, setting, method):
                    by_digest[experiment.digest] = experiment
        return list(by_digest.values())


def read(folder: Path) -> Paper:
    """Return the paper in a folder, or raise InputError if it cannot be read."""
    file = folder / "tables.toml"
    if not file.exists():
        raise InputError(
            f"there is no {file}; the paper's files are in the repository under papers/feddkd: give"
            " that folder with --papers"
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
            paper.table(name)  # raises an error now if the table is missing
    return paper


def _definition(name: str, table: Mapping[str, Any]) -> Definition:
    parts = {
        "tested": tuple(table["tested"]),
        "beside": tuple(table.get("beside", ())),
        "settings": {key: PaperColumn(**value) for key, value in table["settings"].items()},
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
