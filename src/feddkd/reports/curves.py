"""Records -> curves:

the mean over seeds round by round, one deviation to either side, against what has been spent so
far.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from feddkd.rounds.loop import Row
from feddkd.runs.record import Record

Quantity = Callable[[Row], float | None]
Numbers = npt.NDArray[np.float64]
AXES = {  # what a curve can be drawn against
    "round": "rounds",
    "communications": "communications",
    "local_steps": "local steps of an active client",
    "megabytes": "MB sent and received by all clients",
    "seconds": "seconds of wall time",
}
SPENT: Mapping[str, Callable[[Row], float]] = {
    "megabytes": lambda row: (row["bytes_up"] + row["bytes_down"]) / 1e6,
    **{key: lambda row, key=key: row[key] for key in ("round", "communications", "local_steps")},  # type: ignore[misc]
}


class Band(NamedTuple):
    """A quantity in the course of the rounds, as far as all seeds have come."""

    mean: Numbers
    std: Numbers  # population standard deviation


def band(group: Sequence[Record], quantity: Quantity) -> Band | None:
    """None where it was never recorded; NaN in a round where it was not, or was not finite (null in
    the record).
    """
    rounds = min(len(record.history) for record in group)
    found = np.array(
        [[_value(quantity, row) for row in record.history[:rounds]] for record in group],
        dtype=np.float64,
    )
    return None if np.isnan(found).all() else Band(found.mean(0), found.std(0))


def _value(quantity: Quantity, row: Row) -> float | None:
    try:
        return quantity(row)
    except KeyError:
        return None


def spent(group: Sequence[Record]) -> dict[str, Numbers]:
    """Axis -> what the seeds had spent after each round, on average.

    Seconds only where every round was timed.
    """
    bands = {axis: band(group, amount) for axis, amount in SPENT.items()}
    found = {axis: bands[axis].mean for axis in AXES if axis in bands}  # type: ignore[union-attr]
    rounds = min(len(record.history) for record in group)
    if all(len(record.timings) >= rounds for record in group):
        found["seconds"] = np.mean(
            [list(accumulate(record.timings[:rounds])) for record in group], axis=0
        )
    return found


def accuracy(row: Row) -> float:
    return 100 * float(row["test_accuracy"])


def gain(row: Row) -> float:
    """What the phases after the plain average added, in points."""
    return 100 * float(row["test_accuracy"] - row["average_test_accuracy"])


def theory(name: str) -> Quantity:
    """A quantity of the paper's theory, where the run logs them."""
    return lambda row: row["diagnostics"][name]
