"""Records -> a picture:

test accuracy against rounds, communications and local steps, with a band of one deviation over
seeds.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from feddkd.data.sources.formats import Array
from feddkd.errors import InputError
from feddkd.reports.tables import families, labels
from feddkd.rounds.loop import Row
from feddkd.runs.record import Record

AXES = {
    "round": "rounds",
    "communications": "communications",
    "local_steps": "local steps of an active client",
}
Histories = Mapping[str, Sequence[Sequence[Row]]]  # by label: the rows of each seed


def curves(records: Sequence[Record], path: Path) -> None:
    """Draw one curve a method into a file; the ending of its name (.png, .svg, .pdf) chooses the
    format.
    """
    groups = families(records)
    named = zip(labels(groups), groups, strict=True)
    draw({"": {label: [record.history for record in group] for label, group in named}}, path)


def draw(rows: Mapping[str, Histories], path: Path) -> None:
    """A row of pictures for each title."""
    with grid(path, len(rows), len(AXES), (11, 3.2 * len(rows))) as axes_grid:
        for axes, (title, histories) in zip(axes_grid, rows.items(), strict=True):
            _row(axes, title, histories)


@contextmanager
def grid(
    path: Path, rows: int, columns: int, size: tuple[float, float], description: str = ""
) -> Iterator[Any]:
    """Rows of pictures to draw in, written to a file at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        rows, columns, figsize=size, sharey="row", layout="constrained", squeeze=False
    )
    try:
        yield axes
        figure.savefig(
            path,
            dpi=150,
            metadata={"Description": description}
            if description and path.suffix == ".png"
            else None,
        )
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
    accuracy = 100 * np.array(
        [[row["test_accuracy"] for row in history[:rounds]] for history in group]
    )
    band(axis, [row[key] for row in group[0][:rounds]], accuracy, label)


def band(axis: Any, x: Sequence[float], seeds: Array, label: str) -> None:
    """Mean and standard deviation over seeds; without any, only the label."""
    middle, spread = (seeds.mean(0), seeds.std(0)) if len(seeds) else (np.array([]), np.array([]))
    axis.plot(x, middle, label=label)
    axis.fill_between(x, middle - spread, middle + spread, alpha=0.2)
