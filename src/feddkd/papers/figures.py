"""A paper's figures: the runs that each shows, and the curves of the runs so far."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feddkd.errors import InputError, unknown
from feddkd.experiment import Experiment
from feddkd.papers.definitions import Definition, Paper, Quantity
from feddkd.papers.results import RecordedRun, Runs

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """One picture of a figure: a setting of its table, and the elements of a list to average."""

    setting: str
    of: Sequence[int] = ()


@dataclass(frozen=True)
class Figure:
    """A figure: the table whose runs it shows, and the columns on its axes."""

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
        """Return True if a run's rows have the column; losses are logged only with diagnostics."""
        return all(self.column.partition(".")[0] in row for row in run.rounds)

    def points(self, run: RecordedRun, panel: Panel) -> Points:
        """Return a run's points in a picture."""
        y = Quantity("each", self.column, self.scale, of=panel.of)
        return [
            (row[self.x], y.read(row))
            for row in run.rounds
            if self.up_to is None or row[self.x] <= self.up_to
        ]


@dataclass(frozen=True)
class Curve:
    """A method in a picture: the points of each of its seeds, and the missing part."""

    method: str
    seeds: list[Points]
    missing: str  # "" if the curve is complete


def figures(paper: Paper) -> dict[str, Figure]:
    """Return the figures of a paper by name."""
    file = paper.folder / "figures.toml"
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        return {name: _figure(name, table) for name, table in tables.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"the figures in {file} cannot be read: {error!r}") from None


def _figure(name: str, table: Mapping[str, Any]) -> Figure:
    panels = {key: Panel(**panel) for key, panel in table["panels"].items()}
    return Figure(**{"name": name, **table, "panels": panels})


def find(paper: Paper, name: str) -> Figure | Definition:
    """Return the figure or the table with this name."""
    drawn = figures(paper)
    if name not in drawn and name not in paper.tables:
        problem = f"the paper has no table or figure {name!r}"
        raise unknown(problem, name, (*paper.tables, *drawn))
    return drawn[name] if name in drawn else paper.tables[name]


def curves(paper: Paper, figure: Figure, panel: Panel, runs: Runs) -> list[Curve]:
    """Return the curves of all methods in a picture, also of methods without runs."""
    table = paper.table(figure.table)
    return [
        _curve(figure, panel, method, paper.behind(table, panel.setting, method), runs)
        for method in table.whole
    ]


def _curve(
    figure: Figure, panel: Panel, method: str, behind: Sequence[Experiment], runs: Runs
) -> Curve:
    known = [
        (experiment, runs[experiment.digest])
        for experiment in behind
        if experiment.digest in runs and figure.can_show(runs[experiment.digest])
    ]
    if not known:
        return Curve(method, [], "nothing yet")
    missing = []
    if len(known) < len(behind):
        missing.append(f"{len(known)} of {len(behind)} seeds")
    if not all(_ended(figure, experiment, run) for experiment, run in known):
        rounds = min(len(run.rounds) for _, run in known)
        missing.append(f"{rounds} of {known[0][0].rounds} rounds")
    return Curve(method, [figure.points(run, panel) for _, run in known], ", ".join(missing))


def _ended(figure: Figure, experiment: Experiment, run: RecordedRun) -> bool:
    """Return True if further rounds would add no points."""
    return run.reaches(experiment.rounds) or (
        figure.up_to is not None and run.rounds[-1][figure.x] >= figure.up_to
    )


def missing(
    figure: Figure | Definition, experiments: Sequence[Experiment], runs: Runs, until: int | None
) -> list[Experiment]:
    """Return the experiments that need more rounds, or whose rows lack the figure's column."""

    def is_done(experiment: Experiment) -> bool:
        run = runs.get(experiment.digest)
        return run is not None and run.reaches(experiment.length(until)) and not stale(figure, run)

    return [experiment for experiment in experiments if not is_done(experiment)]


def stale(figure: Figure | Definition, run: RecordedRun) -> bool:
    """Return True if a run lacks the figure's column."""
    return isinstance(figure, Figure) and not figure.can_show(run)


def place(figure: Figure | Definition, experiment: Experiment, runs: Runs, folder: Path) -> Path:
    """Return the folder in which a run continues.

    A run without the figure's column is repeated in a separate folder.
    """
    run = runs.get(experiment.digest)
    return folder / "diagnostics" if run is not None and stale(figure, run) else folder
