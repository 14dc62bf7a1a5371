"""The columns of a table of records.

A `TableColumn` says once what it is called, how it is computed and how it is shown. Text, Markdown,
LaTeX, JSON and the page read the columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from feddkd.reports.families import Family, headline_of, target_of
from feddkd.rounds.metrics import ACCURACY, SUCCESS_KEY, Metric, Target, shown_in
from feddkd.runs.client_spread import client_spread
from feddkd.runs.record import Record
from feddkd.runs.summary import best_row, cost_of, last_judged, mean_and_std

WORST, WORST_GROUP = "worst 10 %", "worst group"


@dataclass(frozen=True)
class TableColumn:
    """A column of the table: its values for a family of runs, and how they are shown."""

    name: str  # its heading
    values: Callable[[Family], list[float]]  # seed by seed, for the seeds that have a value
    show: Callable[[list[float]], str]
    section: str = ""  # the JSON object with its mean and deviation; none if empty
    key: str = ""  # in that object; the name if empty
    scale: int = 1  # the factor between a value and the number that is shown
    digits: int = 2  # decimal places of a difference


def columns(records: Sequence[Record]) -> list[TableColumn]:
    """Return the columns of a table of these records."""
    target = target_of(records)
    costs = [COUNT] if target is None else target_columns(target)
    private = any("epsilon" in record.history[-1] for record in records)
    attacked = any(SUCCESS_KEY in record.history[-1] for record in records)
    return [
        *metric_columns(records),
        *costs,
        *([EPSILON] if private else []),
        *([SUCCESS] if attacked else []),
    ]


def metric_columns(records: Sequence[Record]) -> list[TableColumn]:
    """Return the columns of metrics: best, last and average of the headline, then the others."""
    first = headline_of(records)
    others = dict.fromkeys(metric for record in records for metric in shown_in(record.history[0]))
    by_group = any(first.group_key in record.history[0] for record in records)
    by_client = any(first.client_key in record.history[0] for record in records)
    return [
        _metric_column(first, "best", first.test_key, best_row),
        _metric_column(first, "last", first.test_key, last_judged),
        _metric_column(first, "average", first.average_key, last_judged),
        *([_worst_column(first)] if by_client else []),
        *([_worst_group_column(first)] if by_group else []),
        *(
            _metric_column(other, other.title, other.test_key, best_row, key="best")
            for other in others
            if other != first
        ),
    ]


def _worst_column(metric: Metric) -> TableColumn:
    """Return a column with the mean over the worst tenth of the clients, at the best round."""

    def values(family: Family) -> list[float]:
        spreads = [client_spread(best_row(record.history), metric) for record in family]
        return [spread["worst_tenth"] for spread in spreads if spread is not None]

    show, key = partial(mean_text, metric=metric), metric.test_key
    return TableColumn(WORST, values, show, key, "worst_tenth", metric.scale, metric.digits)


def _worst_group_column(metric: Metric) -> TableColumn:
    """Return a column with the value of the worst group of test examples, at the best round."""

    def values(family: Family) -> list[float]:
        rows = [best_row(record.history).get(metric.group_key) or {} for record in family]
        known = [[value for value in row.values() if value is not None] for row in rows]
        return [min(values, key=metric.rank) for values in known if values]

    show, key = partial(mean_text, metric=metric), metric.test_key
    return TableColumn(WORST_GROUP, values, show, key, "worst_group", metric.scale, metric.digits)


def _metric_column(
    metric: Metric, name: str, row_key: str, pick: Callable[..., Any], key: str = ""
) -> TableColumn:
    """Return a column with the value that is under a key of one row of each record."""

    def values(family: Family) -> list[float]:
        found = [pick(record.history).get(row_key) for record in family]
        return [value for value in found if value is not None]

    show = partial(mean_text, metric=metric)
    return TableColumn(name, values, show, metric.test_key, key, metric.scale, metric.digits)


def target_columns(target: Target) -> list[TableColumn]:
    """Return the columns about the seeds that reached a target, and what that cost them."""

    def hits(family: Family) -> list[float]:
        return [float(cost_of(record.history, target) is not None) for record in family]

    def costs(family: Family, cost: Callable[[dict[str, Any]], float]) -> list[float]:
        reached = [cost_of(record.history, target) for record in family]
        return [cost(one) for one in reached if one is not None]

    amounts: dict[str, Callable[[dict[str, Any]], float]] = {
        "rounds": lambda reached: reached["round"],
        "comms": lambda reached: reached["communications"],
        "steps": lambda reached: reached["local_steps"],
        "MB": lambda reached: (reached["bytes_up"] + reached["bytes_down"]) / 1e6,
    }
    return [
        TableColumn("hit", hits, lambda reached: f"{sum(reached):.0f}/{len(reached)}"),
        *(
            TableColumn(name, partial(costs, cost=amount), _cost_text, "to_target")
            for name, amount in amounts.items()
        ),
    ]


def _epsilons(family: Family) -> list[float]:
    """Return the epsilon at the end of each run. Records hold null for infinity."""
    ends = [record.history[-1] for record in family]
    found = [end["epsilon"] for end in ends if "epsilon" in end]
    return [np.inf if epsilon is None else epsilon for epsilon in found]


def _epsilon_text(values: list[float]) -> str:
    """Return the epsilon of the first seed: it is the same for all of them."""
    if not values:
        return "-"
    return "infinite" if np.isinf(values[0]) else f"{values[0]:.2f}"


def _cost_text(values: list[float]) -> str:
    if not values:
        return "-"
    mean, _ = mean_and_std(values)
    return f"{mean:.4g}" if mean < 1000 else f"{mean:.0f}"


def mean_text(values: list[float], metric: Metric) -> str:
    """Return mean and deviation of a metric's values as a table shows them."""
    if not values:
        return "-"
    mean, deviation = (metric.scale * number for number in mean_and_std(values))
    return f"{mean:.{metric.digits}f}±{deviation:.{metric.digits}f}"


def _successes(family: Family) -> list[float]:
    """Return how often the attack succeeded at the end of each run."""
    return [r.history[-1][SUCCESS_KEY] for r in family if SUCCESS_KEY in r.history[-1]]


SUCCESS = TableColumn(
    "attack", _successes, partial(mean_text, metric=ACCURACY), SUCCESS_KEY, "last", scale=100
)
COUNT = TableColumn("n", lambda family: [1.0] * len(family), lambda ones: str(len(ones)))
EPSILON = TableColumn("epsilon", _epsilons, _epsilon_text)
