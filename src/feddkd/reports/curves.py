"""Records -> curves: the mean over seeds after each round with one deviation to either side,
against the costs so far.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from feddkd.rounds.metrics import Metric
from feddkd.runs.record import Record

if TYPE_CHECKING:  # curves of records need no torch
    from feddkd.rounds.loop import Row

Quantity = Callable[["Row"], float | None]
Numbers = npt.NDArray[np.float64]
AXES = {  # what a curve can be drawn against
    "round": "rounds",
    "communications": "communications",
    "local_steps": "local steps of an active client",
    "megabytes": "MB sent and received by all clients",
    "seconds": "seconds of wall time",
}
COSTS: Mapping[str, Quantity] = {
    "megabytes": lambda row: (row["bytes_up"] + row["bytes_down"]) / 1e6,
    "round": lambda row: row["round"],
    "communications": lambda row: row["communications"],
    "local_steps": lambda row: row["local_steps"],
}


class Band(NamedTuple):
    """A quantity after each round that all seeds have played."""

    mean: Numbers
    std: Numbers  # population standard deviation


def band(group: Sequence[Record], quantity: Quantity) -> Band | None:
    """Return the band of a quantity over seeds; None if no row has it. It is NaN in a round where a
    row lacks it or holds null.
    """
    rounds = min(len(record.history) for record in group)
    values = [[_value(quantity, row) for row in record.history[:rounds]] for record in group]
    numbers = np.array(values, dtype=np.float64)
    return None if np.isnan(numbers).all() else Band(numbers.mean(0), numbers.std(0))


def _value(quantity: Quantity, row: "Row") -> float | None:
    try:
        return quantity(row)
    except KeyError:
        return None


def spent(group: Sequence[Record]) -> dict[str, Numbers]:
    """Return the mean costs of the seeds after each round, by axis; seconds only if every round was
    timed.
    """
    rounds = min(len(record.history) for record in group)
    costs = {}
    for axis in AXES:
        found = band(group, COSTS[axis]) if axis in COSTS else None
        if found is not None:
            costs[axis] = found.mean
    if all(len(record.timings) >= rounds for record in group):
        times = [list(accumulate(record.timings[:rounds])) for record in group]
        costs["seconds"] = np.mean(times, axis=0)
    return costs


def on_test(metric: Metric) -> Quantity:
    """Return the quantity "value on the test set", in its unit."""
    return lambda row: _scaled(metric, row[metric.test_key])


def gain(metric: Metric) -> Quantity:
    """Return the quantity "value after DKD less that of the plain average", in its unit."""

    def difference(row: "Row") -> float | None:
        after, before = row[metric.test_key], row[metric.average_key]
        return None if after is None or before is None else _scaled(metric, after - before)

    return difference


def _scaled(metric: Metric, value: float | None) -> float | None:
    return None if value is None else metric.scale * float(value)


def theory(name: str) -> Quantity:
    """Return a quantity of the paper's theory, which rows hold if the run logs diagnostics."""
    return lambda row: row["diagnostics"][name]
