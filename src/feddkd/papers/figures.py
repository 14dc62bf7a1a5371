"""A paper's figures: which runs each shows, and what of them there is."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feddkd.errors import InputError, choices
from feddkd.experiment import Experiment
from feddkd.papers.definitions import Definition, Paper, Quantity
from feddkd.papers.results import RecordedRun, Runs

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """One picture of a figure: a setting of its table, and which numbers of a list are meant."""

    setting: str
    of: Sequence[int] = ()


@dataclass(frozen=True)
class Figure:
    """What is drawn against what, and of which runs."""

    name: str
    title: str
    table: str
    x: str
    column: str
    label: str
    panels: Mapping[str, Panel]
    scale: float = 1.0
    up_to: float | None = None

    def can_show(self, run: RecordedRun) -> bool:
        """Whether its rows have what is drawn: losses are logged with diagnostics alone."""
        return all(self.column.partition(".")[0] in row for row in run.rounds)

    def points(self, run: RecordedRun, panel: Panel) -> Points:
        y = Quantity("each", self.column, self.scale, of=panel.of)
        return [
            (row[self.x], y.read(row))
            for row in run.rounds
            if self.up_to is None or row[self.x] <= self.up_to
        ]


@dataclass(frozen=True)
class Curve:
    """A method in a picture: the points of each of its seeds, and what is still missing."""

    method: str
    seeds: list[Points]
    missing: str  # "" where the curve is whole


def figures(paper: Paper) -> dict[str, Figure]:
    file = paper.folder / "figures.toml"
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        return {name: _figure(name, table) for name, table in tables.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"the figures in {file} cannot be read: {error!r}") from None


def _figure(name: str, table: Mapping[str, Any]) -> Figure:
    return Figure(
        **{
            "name": name,
            **table,
            "panels": {key: Panel(**panel) for key, panel in table["panels"].items()},
        }
    )


def find(paper: Paper, name: str) -> Figure | Definition:
    """A figure, or else a table, by its name."""
    drawn = figures(paper)
    if name not in drawn and name not in paper.tables:
        raise InputError(
            f"the paper has no table or figure {name!r}; there are:"
            f" {choices((*paper.tables, *drawn))}"
        )
    return drawn[name] if name in drawn else paper.tables[name]


def curves(paper: Paper, figure: Figure, panel: Panel, runs: Runs) -> list[Curve]:
    """All methods of a picture, those that have not been run, too."""
    table = paper.table(figure.table)
    return [
        _curve(figure, panel, method, paper.behind(table, panel.setting, method), runs)
        for method in table.whole
    ]


def _curve(
    figure: Figure, panel: Panel, method: str, behind: Sequence[Experiment], runs: Runs
) -> Curve:
    known = [
        (one, runs[one.digest])
        for one in behind
        if one.digest in runs and figure.can_show(runs[one.digest])
    ]
    if not known:
        return Curve(method, [], "nothing yet")
    rounds = min(len(run.rounds) for _, run in known)
    ended = all(_ended(figure, one, run) for one, run in known)
    parts = [
        *([] if len(known) == len(behind) else [f"{len(known)} of {len(behind)} seeds"]),
        *([] if ended else [f"{rounds} of {known[0][0].rounds} rounds"]),
    ]
    return Curve(method, [figure.points(run, panel) for _, run in known], ", ".join(parts))


def _ended(figure: Figure, experiment: Experiment, run: RecordedRun) -> bool:
    """Whether more rounds would draw no more."""
    return run.reaches(experiment.rounds) or (
        figure.up_to is not None and run.rounds[-1][figure.x] >= figure.up_to
    )


def missing(
    figure: Figure | Definition, experiments: Sequence[Experiment], runs: Runs, until: int | None
) -> list[Experiment]:
    """Of some experiments those that have not come as far as wanted, or whose rows lack what a
    figure draws.
    """

    def there(one: Experiment) -> bool:
        run = runs.get(one.digest)
        return run is not None and run.reaches(one.length(until)) and not stale(figure, run)

    return [one for one in experiments if not there(one)]


def stale(figure: Figure | Definition, run: RecordedRun) -> bool:
    return isinstance(figure, Figure) and not figure.can_show(run)


def place(figure: Figure | Definition, experiment: Experiment, runs: Runs, folder: Path) -> Path:
    """Where a run goes on.

    One that was made without what a figure draws is made again, in a folder of its own.
    """
    run = runs.get(experiment.digest)
    return folder / "diagnostics" if run is not None and stale(figure, run) else folder
