"""Draws a paper's tables and figures from our runs."""

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
from feddkd.rounds.loop import Row


def paper_curves(paper: Paper, name: str, runs: Runs, path: Path) -> None:
    """Draw the curves of a table's runs: one row of pictures for each setting that has runs."""
    table = paper.table(name)
    rows: dict[str, dict[str, list[list[Row]]]] = {}
    for setting in table.settings:
        for method in table.whole:
            experiments = paper.behind(table, setting, method)
            histories = [runs[one.digest].rounds for one in experiments if one.digest in runs]
            if histories:
                rows.setdefault(setting, {})[method] = histories
    if not rows:
        raise InputError(
            f"there are no runs of table {name!r} yet; `feddkd paper run {name}` makes some"
        )
    draw(rows, path)


def draw_figure(paper: Paper, figure: Figure, runs: Runs, path: Path) -> None:
    """Draw a figure of the paper.

    A .png also stores the digest of its curves, which tells whether it is up to date.
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
        for axis, (title, curves) in zip(axes.flat, panels.items(), strict=False):
            _panel(axis, figure, title, curves)


def digest(panels: Mapping[str, Sequence[Curve]]) -> str:
    """Return the digest of a figure's curves."""
    content = {title: [astuple(curve) for curve in panel] for title, panel in panels.items()}
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def draw_all(paper: Paper, runs: Runs, folder: Path) -> list[Path]:
    """Draw every figure that has runs to NAME.png, and return the paths.

    A picture that already shows the same curves is not drawn again.
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
    """Return the digest that a picture stores; None if there is no picture."""
    from PIL import Image

    if not path.exists():
        return None
    with Image.open(path) as picture:
        return picture.info.get("Description")


def _panel(axis: Any, figure: Figure, title: str, curves: Sequence[Curve]) -> None:
    for curve in curves:
        length = min(map(len, curve.seeds), default=0)  # rounds that all seeds have reached
        y = np.array([[point[1] for point in seed[:length]] for seed in curve.seeds])
        label = f"{curve.method}: {curve.missing}" if curve.missing else curve.method
        band(axis, [point[0] for point in curve.seeds[0][:length]] if length else [], y, label)
    axis.set_title(title, loc="left")
    axis.set_xlabel(AXES[figure.x])
    axis.set_xlim(left=0, right=figure.up_to)
    axis.set_ylabel(figure.label)
    axis.grid(alpha=0.3)
    axis.legend(title="mean ± std over seeds", fontsize=7, title_fontsize=7)
