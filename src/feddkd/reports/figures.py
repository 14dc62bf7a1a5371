"""Records -> figures and tables for a paper, all in one style:

as wide as a column, in PDF, SVG and PNG; LaTeX and Markdown.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from feddkd.errors import InputError
from feddkd.reports import curves
from feddkd.reports.curves import Quantity
from feddkd.reports.formats import GRIDS
from feddkd.reports.tables import confused, families, grid, labels, target_of
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
    # fonts embedded as such, so that text can be searched and publishers are content
    "pdf.fonttype": 42,
    "svg.fonttype": "path",  # drawn, so that no font is missing
    "svg.hashsalt": "feddkd",  # the same figure, the same bytes
    "text.parse_math": False,  # a name may hold a dollar sign
}
Plate = Callable[[Any, Any], None]  # draws into a matplotlib figure and its axes


def plates(records: Sequence[Record], folder: Path) -> list[Path]:
    """Write every figure there is something to draw for, and the table; returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    from cycler import cycler
    from matplotlib import pyplot

    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with pyplot.rc_context({**STYLE, "axes.prop_cycle": cycler(color=COLOURS)}):
            for name, plate in _every(records):
                figure, axes = pyplot.subplots()
                plate(figure, axes)
                written += [folder / f"{name}.{ending}" for ending in FORMATS]
                for path in written[-len(FORMATS) :]:
                    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
                pyplot.close(figure)
        for ending, write in GRIDS.items():
            written.append(folder / f"table.{ending}")
            written[-1].write_text(write(*grid(records)) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write figures to {folder}: {error.strerror}") from None
    return written


def _every(records: Sequence[Record]) -> Iterator[tuple[str, Plate]]:
    groups = families(records)
    named = dict(zip(labels(groups), groups, strict=True))
    for axis, title in curves.AXES.items():
        if all(axis in curves.spent(group) for group in groups):
            guide = target_of(records)
            yield (
                f"accuracy-{axis.replace('_', '-')}",
                _curves(named, axis, title, "test accuracy in %", curves.accuracy, guide),
            )
    for name, (quantity, title) in {
        "gain": (curves.gain, "gain of DKD in points"),
        "l2": (curves.theory("L2"), "L2' after DKD, nats"),
        "bound": (curves.theory("bound"), "L1' + L2' after DKD, nats"),
    }.items():
        some = {
            label: group
            for label, group in named.items()
            if curves.band(group, quantity) is not None
        }
        if some:
            yield name, _curves(some, "round", "rounds", title, quantity)
    held = next((record.partition for record in records if record.partition is not None), None)
    if held is not None:
        yield "partition", _squares(held, "class", "client", "training examples")
    for number, (label, group) in enumerate(named.items()):
        if (found := confused(group)) is not None:
            yield (
                f"confusion-{number}",
                _squares(found, "taken for", "class", f"test examples, {label}"),
            )


def _curves(
    named: dict[str, list[Record]],
    axis: str,
    across: str,
    up: str,
    quantity: Quantity,
    guide: float | None = None,
) -> Plate:
    def plate(figure: Any, axes: Any) -> None:
        for label, group in named.items():
            band, x = curves.band(group, quantity), curves.spent(group)[axis]
            if band is not None:
                axes.plot(x, band.mean, label=label)
                axes.fill_between(
                    x, band.mean - band.std, band.mean + band.std, alpha=0.18, linewidth=0
                )
        if guide is not None:
            axes.axhline(100 * guide, color="0.35", linestyle=":", linewidth=0.8)
        axes.set(xlabel=across, ylabel=up)
        figure.legend(loc="outside upper center", ncols=3 if max(map(len, named)) < 14 else 1)

    return plate


def _squares(table: Counts, across: str, up: str, what: str) -> Plate:
    def plate(figure: Any, axes: Any) -> None:
        picture = axes.imshow(table.counts, cmap="Blues", aspect="auto", interpolation="nearest")
        figure.colorbar(picture, label=what)
        axes.grid(visible=False)
        axes.set(xlabel=across, ylabel=up)
        step = -(-len(table.classes) // 16)  # so that names do not run into each other
        axes.set_xticks(range(0, len(table.classes), step), table.classes[::step])

    return plate
