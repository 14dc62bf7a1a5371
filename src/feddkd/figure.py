"""Records -> a picture: test accuracy against rounds, communications and local steps, with a band of one deviation over seeds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from feddkd.errors import InputError
from feddkd.papers.definitions import Paper
from feddkd.papers.runs import Runs
from feddkd.record import Record
from feddkd.report import families, labels
from feddkd.rounds import Row

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
    methods = [method for method, line in table.methods.items() if line.rounds is None]  # the others are parts of these
    rows = {
        setting: {
            method: [runs[one.digest].rounds for one in behind if one.digest in runs]
            for method, behind in ((method, paper.behind(table, setting, method)) for method in methods)
        }
        for setting in table.settings
    }
    some = {setting: {method: held for method, held in row.items() if held} for setting, row in rows.items()}
    if not any(some.values()):
        raise InputError(f"there are no runs of table {name!r} yet; `feddkd paper run {name}` makes some")
    draw({setting: row for setting, row in some.items() if row}, path)


def draw(rows: Mapping[str, Histories], path: Path) -> None:
    """A row of pictures for each title."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (11, 3.2 * len(rows))
    figure, grid = pyplot.subplots(len(rows), len(AXES), figsize=size, sharey="row", layout="constrained", squeeze=False)
    for axes, (title, histories) in zip(grid, rows.items(), strict=True):
        _row(axes, title, histories)
    try:
        figure.savefig(path, dpi=150)
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
    x, middle, spread = [row[key] for row in group[0][:rounds]], accuracy.mean(0), accuracy.std(0)
    axis.plot(x, middle, label=label)
    axis.fill_between(x, middle - spread, middle + spread, alpha=0.2)
