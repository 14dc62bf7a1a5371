"""Pictures of a paper's tables and figures, from the runs behind them."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np

from feddkd.errors import InputError
from feddkd.papers.definitions import Paper
from feddkd.papers.figures import Curve, Figure, figures
from feddkd.papers.report import drawable, shown
from feddkd.papers.results import Runs
from feddkd.reports.curve_plot import AXES, band, draw, grid


def paper_curves(paper: Paper, name: str, runs: Runs, path: Path) -> None:
    """The curves behind a paper's table: a row of pictures for each setting of which there are
    runs.
    """
    table = paper.table(name)
    rows = {
        setting: {
            method: [runs[one.digest].rounds for one in behind if one.digest in runs]
            for method, behind in (
                (method, paper.behind(table, setting, method)) for method in table.whole
            )
        }
        for setting in table.settings
    }
    some = {
        setting: {method: held for method, held in row.items() if held}
        for setting, row in rows.items()
    }
    if not any(some.values()):
        raise InputError(
            f"there are no runs of table {name!r} yet; `feddkd paper run {name}` makes some"
        )
    draw({setting: row for setting, row in some.items() if row}, path)


def draw_figure(paper: Paper, figure: Figure, runs: Runs, path: Path) -> None:
    """A figure of the paper; in a .png the digest of what it shows, so that one can see whether it
    is up to date.
    """
    panels = shown(paper, figure, runs)
    if not drawable(panels):
        raise InputError(
            f"there are no runs of figure {figure.name!r} yet; `feddkd paper run {figure.name}`"
            " makes some"
        )
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    with grid(path, rows, columns, (4 * columns, 3.2 * rows), digest(panels)) as axes:
        for axis in axes.flat[len(panels) :]:
            axis.remove()
        for axis, (title, found) in zip(axes.flat, panels.items(), strict=False):
            _panel(axis, figure, title, found)


def digest(panels: Mapping[str, Sequence[Curve]]) -> str:
    """Of all that a figure shows."""
    told = {title: [astuple(curve) for curve in panel] for title, panel in panels.items()}
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def draw_all(paper: Paper, runs: Runs, folder: Path) -> list[Path]:
    """Every figure of which there are runs, as NAME.png; one that shows the same already is left as
    it is.
    """
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
        band(axis, [point[0] for point in curve.seeds[0][:length]] if length else [], y, label)
    axis.set_title(title, loc="left")
    axis.set_xlabel(AXES[figure.x])
    axis.set_xlim(left=0, right=figure.up_to)
    axis.set_ylabel(figure.label)
    axis.grid(alpha=0.3)
    axis.legend(title="mean ± std over seeds", fontsize=7, title_fontsize=7)
