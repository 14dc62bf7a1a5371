"""Records -> a picture: test accuracy against rounds, communications and local steps, with a band of one deviation over seeds."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from feddkd.errors import InputError
from feddkd.record import Record
from feddkd.report import families, labels

AXES = {"round": "rounds", "communications": "communications", "local_steps": "local steps of an active client"}


def curves(records: Sequence[Record], path: Path) -> None:
    """Draw one curve a method into a file; the ending of its name (.png, .svg, .pdf) chooses the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = families(records)
    figure, axes = pyplot.subplots(1, len(AXES), figsize=(11, 3.2), sharey=True, layout="constrained")
    for axis, (key, heading) in zip(axes, AXES.items(), strict=True):
        for label, group in zip(labels(groups), groups, strict=True):
            rounds = min(len(record.history) for record in group)
            accuracy = 100 * np.array([[row["test_accuracy"] for row in record.history[:rounds]] for record in group])
            x, middle, spread = [row[key] for row in group[0].history[:rounds]], accuracy.mean(0), accuracy.std(0)
            axis.plot(x, middle, label=label)
            axis.fill_between(x, middle - spread, middle + spread, alpha=0.2)
        axis.set_xlabel(heading)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("test accuracy in %")
    axes[0].legend(title=f"mean ± std, {max(map(len, groups))} seeds", fontsize=8)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot draw to {path}: {error}") from None
    finally:
        pyplot.close(figure)
