"""Records -> figures and tables for a paper.

All figures have one style and the width of a column; they are written as PDF, SVG and PNG, the
table as LaTeX and Markdown.
"""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from feddkd.errors import InputError
from feddkd.reports import curves
from feddkd.reports.curves import Quantity
from feddkd.reports.families import confused, families, headline_of, labels, target_of
from feddkd.reports.formats import GRIDS
from feddkd.reports.tables import grid
from feddkd.rounds.metrics import shown_in
from feddkd.runs.record import Counts, Record

COLUMN = 3.3  # inches
FORMATS = ("pdf", "svg", "png")
COLOURS = [
    "#0b6bcb",
    "#c8402f",
    "#1f8a4c",
    "#a8650a",
    "#7346c7",
    "#0b7f86",
    "#b93285",
    "#5f6775",
    "#7d512c",
    "#567a0c",
]
STYLE: Any = {
    "figure.figsize": (COLUMN, 2.3),
    "figure.constrained_layout.use": True,
    "font.size": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "lines.linewidth": 1.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.5,
    "savefig.dpi": 300,
    "pdf.fonttype": 42,  # fonts are embedded as fonts: text can be searched, publishers accept it
    "svg.fonttype": "path",  # text is drawn as outlines, so that no font is missing
    "svg.hashsalt": "feddkd",  # the same figure has the same bytes
    "text.parse_math": False,  # a name may hold a dollar sign
}
Draw = Callable[[Any, Any], None]  # draws into a matplotlib figure and its axes


def write_figures(records: Sequence[Record], folder: Path) -> list[Path]:
    """Write every figure that the records have data for, and the table; return the files."""
    import matplotlib

    matplotlib.use("Agg")
    from cycler import cycler
    from matplotlib import pyplot

    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with pyplot.rc_context({**STYLE, "axes.prop_cycle": cycler(color=COLOURS)}):
            for name, draw in _figures(records):
                figure, axes = pyplot.subplots()
                draw(figure, axes)
                written += _save(figure, folder / name)
                pyplot.close(figure)
        for suffix, write in GRIDS.items():
            path = folder / f"table.{suffix}"
            path.write_text(write(*grid(records)) + "\n", encoding="utf-8")
            written.append(path)
    except OSError as error:
        raise InputError(f"cannot write figures to {folder}: {error.strerror}") from None
    return written


def _save(figure: Any, base: Path) -> list[Path]:
    """Write a figure in every format; return the files."""
    paths = [base.with_name(f"{base.name}.{suffix}") for suffix in FORMATS]
    for path in paths:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def _figures(records: Sequence[Record]) -> Iterator[tuple[str, Draw]]:
    """Yield names of files and the functions that draw them."""
    groups = families(records)
    named = dict(zip(labels(groups), groups, strict=True))
    yield from _metric_figures(records, named)
    first = headline_of(records)
    difference = f"gain of DKD in{first.difference_unit or f' {first.title}'}"
    quantities: dict[str, tuple[Quantity, str]] = {
        "gain": (curves.gain(first), difference),
        "l2": (curves.theory("L2"), "L2' after DKD, nats"),
        "bound": (curves.theory("bound"), "L1' + L2' after DKD, nats"),
    }
    for name, (quantity, title) in quantities.items():
        some = _with(named, quantity)
        if some:
            yield name, _curves(some, "round", "rounds", title, quantity)
    for number, (title, held) in enumerate(_partitions(records).items()):
        name = f"partition-{number}" if number else "partition"
        yield name, _squares(held, "class", "client", "training examples", title)
    for number, (label, group) in enumerate(named.items()):
        matrix = confused(group)
        if matrix is not None:
            title = f"test examples, {label}"
            yield f"confusion-{number}", _squares(matrix, "predicted class", "class", title)


def _metric_figures(
    records: Sequence[Record], named: dict[str, list[Record]]
) -> Iterator[tuple[str, Draw]]:
    """Yield the curves of each metric against each cost that all records have."""
    target = target_of(records)
    metrics = dict.fromkeys(metric for record in records for metric in shown_in(record.history[0]))
    costs = [curves.spent(group) for group in named.values()]
    for metric in metrics:
        quantity = curves.on_test(metric)
        some = _with(named, quantity)
        is_guide = target is not None and target.metric == metric
        guide = metric.scale * target.value if target is not None and is_guide else None
        for axis, title in curves.AXES.items():
            if some and all(axis in each for each in costs):
                name = f"{metric.name}-{axis}".replace("_", "-")
                yield name, _curves(some, axis, title, metric.heading, quantity, guide)


def _with(named: dict[str, list[Record]], quantity: Quantity) -> dict[str, list[Record]]:
    """Return the families that have a quantity."""
    return {
        label: group for label, group in named.items() if curves.band(group, quantity) is not None
    }


def _curves(
    named: dict[str, list[Record]],
    axis: str,
    x_title: str,
    y_title: str,
    quantity: Quantity,
    guide: float | None = None,
) -> Draw:
    """Return a function that draws one curve for each family, and a dotted line at `guide`."""

    def draw(figure: Any, axes: Any) -> None:
        for label, group in named.items():
            band, x = curves.band(group, quantity), curves.spent(group)[axis]
            if band is not None:
                there = np.isfinite(band.mean)  # not every round is evaluated
                mean, std = band.mean[there], band.std[there]
                axes.plot(x[there], mean, label=label)
                axes.fill_between(x[there], mean - std, mean + std, alpha=0.18, linewidth=0)
        if guide is not None:
            axes.axhline(guide, color="0.35", linestyle=":", linewidth=0.8)
        axes.set(xlabel=x_title, ylabel=y_title)
        figure.legend(loc="outside upper center", ncols=3 if max(map(len, named)) < 14 else 1)

    return draw


def _partitions(records: Sequence[Record]) -> dict[str, Counts]:
    """Return who holds what by the name of the partition, of the first seed of each."""
    found: dict[str, Counts] = {}
    for record in records:
        spelled, canonical = record.manifest["experiment"], record.manifest["canonical"]
        if record.partition is not None:
            found.setdefault(f"{spelled['partition']} of {canonical['data']}", record.partition)
    return found


def _squares(table: Counts, x_title: str, y_title: str, title: str, name: str = "") -> Draw:
    """Return a function that draws a table of numbers as colours, below its name."""

    def draw(figure: Any, axes: Any) -> None:
        image = axes.imshow(table.counts, cmap="Blues", aspect="auto", interpolation="nearest")
        figure.colorbar(image, label=title)
        axes.grid(visible=False)
        axes.set(xlabel=x_title, ylabel=y_title)
        axes.set_title("\n".join(textwrap.wrap(name, 48)), fontsize="small")
        step = -(-len(table.classes) // 16)  # so that names do not overlap
        axes.set_xticks(range(0, len(table.classes), step), table.classes[::step])

    return draw
