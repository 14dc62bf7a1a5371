"""Records -> a picture: test accuracy against rounds, communications and local steps, with a band of one deviation over seeds."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np

from feddkd.data.sources.formats import Array
from feddkd.errors import InputError
from feddkd.papers.definitions import Paper
from feddkd.papers.figures import Curve, Figure, figures
from feddkd.papers.report import drawable, shown
from feddkd.papers.results import Runs
from feddkd.reports.tables import families, labels
from feddkd.rounds.loop import Row
from feddkd.runs.record import Record

AXES = {"round": "rounds", "communications": "communications", "local_steps": "local steps of an active client"}
Histories = Mapping[str, Sequence[Sequence[Row]]]  # by label: the rows of each seed


def curves(records: Sequence[Record], path: Path) -> None:
    """Draw one curve a method into a file; the ending of its name (.png, .svg, .pdf) chooses the format."""
    groups = families(records)
    named = zip(labels(groups), groups, strict=True)
    draw({"": {label: [record.history for record in group] for label, group in named}}, path)


def paper_curves(paper: Paper, name: str, runs: Runs, path: Path) -> None:
    """The curves behind a paper's table: a row of pictures for each setting of which there are runs."""
    table = paper.table(name)
    rows = {
        setting: {
            method: [runs[one.digest].rounds for one in behind if one.digest in runs]
            for method, behind in ((method, paper.behind(table, setting, method)) for method in table.whole)
        }
        for setting in table.settings
    }
    some = {setting: {method: held for method, held in row.items() if held} for setting, row in rows.items()}
    if not any(some.values()):
        raise InputError(f"there are no runs of table {name!r} yet; `feddkd paper run {name}` makes some")
    draw({setting: row for setting, row in some.items() if row}, path)


def draw(rows: Mapping[str, Histories], path: Path) -> None:
    """A row of pictures for each title."""
    with _grid(path, len(rows), len(AXES), (11, 3.2 * len(rows))) as grid:
        for axes, (title, histories) in zip(grid, rows.items(), strict=True):
            _row(axes, title, histories)


def draw_figure(paper: Paper, figure: Figure, runs: Runs, path: Path) -> None:
    """A figure of the paper; in a .png the digest of what it shows, so that one can see whether it is up to date."""
    panels = shown(paper, figure, runs)
    if not drawable(panels):
        raise InputError(f"there are no runs of figure {figure.name!r} yet; `feddkd paper run {figure.name}` makes some")
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    with _grid(path, rows, columns, (4 * columns, 3.2 * rows), digest(panels)) as grid:
        for axis in grid.flat[len(panels) :]:
            axis.remove()
        for axis, (title, found) in zip(grid.flat, panels.items(), strict=False):
            _panel(axis, figure, title, found)


def digest(panels: Mapping[str, Sequence[Curve]]) -> str:
    """Of all that a figure shows."""
    told = {title: [astuple(curve) for curve in panel] for title, panel in panels.items()}
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def draw_all(paper: Paper, runs: Runs, folder: Path) -> list[Path]:
    """Every figure of which there are runs, as NAME.png; one that shows the same already is left as it is."""
    drawn = []
    for figure in figures(paper).values():
        path, panels = folder / f"{figure.name}.png", shown(paper, figure, runs)
        if drawable(panels):
            if drawn_digest(path) != digest(panels):
                draw_figure(paper, figure, runs, path)
            drawn.append(path)
    return drawn


def drawn_digest(path: Path) -> str | None:
    """What a picture says it shows."""
    from PIL import Image

    if not path.exists():
        return None
    with Image.open(path) as picture:
        return picture.info.get("Description")


def _panel(axis: Any, figure: Figure, title: str, found: Sequence[Curve]) -> None:
    for curve in found:
        length = min(map(len, curve.seeds), default=0)  # as far as all seeds have come
        y = np.array([[point[1] for point in seed[:length]] for seed in curve.seeds])
        label = f"{curve.method}: {curve.missing}" if curve.missing else curve.method
        _band(axis, [point[0] for point in curve.seeds[0][:length]] if length else [], y, label)
    axis.set_title(title, loc="left")
    axis.set_xlabel(AXES[figure.x])
    axis.set_xlim(left=0, right=figure.up_to)
    axis.set_ylabel(figure.label)
    axis.grid(alpha=0.3)
    axis.legend(title="mean ± std over seeds", fontsize=7, title_fontsize=7)


@contextmanager
def _grid(path: Path, rows: int, columns: int, size: tuple[float, float], description: str = "") -> Iterator[Any]:
    """Rows of pictures to draw in, written to a file at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(rows, columns, figsize=size, sharey="row", layout="constrained", squeeze=False)
    try:
        yield grid
        figure.savefig(path, dpi=150, metadata={"Description": description} if description and path.suffix == ".png" else None)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot draw to {path}: {error}") from None
    finally:
        pyplot.close(figure)


def _row(axes: Sequence[Any], title: str, histories: Histories) -> None:
    for axis, (key, heading) in zip(axes, AXES.items(), strict=True):
        for label, group in histories.items():
            _curve(axis, key, label, group)
        axis.set_xlabel(heading)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("test accuracy in %")
    axes[0].set_title(title, loc="left")
    axes[0].legend(title=f"mean ± std, {max(map(len, histories.values()))} seeds", fontsize=8)


def _curve(axis: Any, key: str, label: str, group: Sequence[Sequence[Row]]) -> None:
    """As far as all seeds have come."""
    rounds = min(map(len, group))
    accuracy = 100 * np.array([[row["test_accuracy"] for row in history[:rounds]] for history in group])
    _band(axis, [row[key] for row in group[0][:rounds]], accuracy, label)


def _band(axis: Any, x: Sequence[float], seeds: Array, label: str) -> None:
    """Mean and standard deviation over seeds; without any, only the label."""
    middle, spread = (seeds.mean(0), seeds.std(0)) if len(seeds) else (np.array([]), np.array([]))
    axis.plot(x, middle, label=label)
    axis.fill_between(x, middle - spread, middle + spread, alpha=0.2)
