"""Records -> one picture: the headline metric on the test set against rounds, communications and
local steps, with a band of one deviation over seeds.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from feddkd.errors import InputError
from feddkd.reports.families import families, headline_of, labels
from feddkd.rounds.metrics import ACCURACY, Metric
from feddkd.runs.record import Record

if TYPE_CHECKING:  # pictures of records need no torch
    from feddkd.data.sources.file_reading import Array
    from feddkd.rounds.loop import Row

AXES = {
    "round": "rounds",
    "communications": "communications",
    "local_steps": "local steps of an active client",
}
Histories = Mapping[str, "Sequence[Sequence[Row]]"]  # label -> the rows of each seed


def curves(records: Sequence[Record], path: Path) -> None:
    """Draw one curve for each method into a file; the suffix of its name (.png, .svg, .pdf) chooses
    the format.
    """
    metric, groups = headline_of(records), families(records)
    histories: dict[str, list[list[Row]]] = {}
    for label, group in zip(labels(groups), groups, strict=True):
        kept = [record.history for record in group]
        histories[label] = [rows for rows in kept if metric.test_key in rows[0]]
    draw({"": {label: rows for label, rows in histories.items() if rows}}, path, metric)


def draw(rows: Mapping[str, Histories], path: Path, metric: Metric = ACCURACY) -> None:
    """Draw a row of pictures for each title."""
    with grid(path, len(rows), len(AXES), (11, 3.2 * len(rows))) as axes_grid:
        for axes, (title, histories) in zip(axes_grid, rows.items(), strict=True):
            _row(axes, title, histories, metric)


@contextmanager
def grid(
    path: Path, rows: int, columns: int, size: tuple[float, float], description: str = ""
) -> Iterator[Any]:
    """Yield rows of axes to draw in, and write them to a file at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        rows, columns, figsize=size, sharey="row", layout="constrained", squeeze=False
    )
    described = description and path.suffix == ".png"
    try:
        yield axes
        metadata = {"Description": description} if described else None
        figure.savefig(path, dpi=150, metadata=metadata)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot draw to {path}: {error}") from None
    finally:
        pyplot.close(figure)


def _row(axes: Sequence[Any], title: str, histories: Histories, metric: Metric) -> None:
    for axis, (key, heading) in zip(axes, AXES.items(), strict=True):
        for label, group in histories.items():
            _curve(axis, key, label, group, metric)
        axis.set_xlabel(heading)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(metric.heading)
    axes[0].set_title(title, loc="left")
    axes[0].legend(title=f"mean ± std, {max(map(len, histories.values()))} seeds", fontsize=8)


def _curve(
    axis: Any, key: str, label: str, group: "Sequence[Sequence[Row]]", metric: Metric
) -> None:
    """Draw the rounds that all seeds have played."""
    rounds = min(map(len, group))
    judged = [n for n in range(rounds) if all(metric.test_key in rows[n] for rows in group)]
    values = [[rows[n][metric.test_key] for n in judged] for rows in group]
    seeds = metric.scale * np.array(values, dtype=np.float64)
    band(axis, [group[0][n][key] for n in judged], seeds, label)


def band(axis: Any, x: Sequence[float], seeds: "Array", label: str) -> None:
    """Draw mean and standard deviation over seeds; without seeds, only the label."""
    middle, spread = (seeds.mean(0), seeds.std(0)) if len(seeds) else (np.array([]), np.array([]))
    axis.plot(x, middle, label=label)
    axis.fill_between(x, middle - spread, middle + spread, alpha=0.2)
