"""A run's rows -> the numbers people quote, each by a named rule."""

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from feddkd.rounds.metrics import Target, headline, read_target, shown_in
from feddkd.runs.client_spread import client_spreads

if TYPE_CHECKING:
    from feddkd.runs.record import Row

COSTS = ("communications", "local_steps", "bytes_up", "bytes_down")
BY_VALIDATION, BY_TEST = "best validation round", "best test round: no validation set"


def summarise(history: "Sequence[Row]", target: float | str | None = None) -> dict[str, Any]:
    """Return the test metrics at the best round and at the end, the costs of the run, and the costs
    until the target was reached; at the best round also how metrics differ between clients.

    The headline metric picks the best round: on the validation set, or on the test set if there is
    no validation set. The latter is an upper bound, and `selection` says so.
    """
    metric, best, last = headline(history), best_row(history), history[-1]
    end = last_judged(history)
    others = [other for other in shown_in(history[0]) if other != metric]
    return {
        "rounds": last["round"],
        metric.test_key: best[metric.test_key],
        "best_round": best["round"],
        "selection": BY_VALIDATION if metric.validation_key in history[0] else BY_TEST,
        f"final_{metric.test_key}": end[metric.test_key],
        **{other.test_key: best.get(other.test_key) for other in others},
        **{f"final_{other.test_key}": end.get(other.test_key) for other in others},
        **{cost: last[cost] for cost in COSTS},
        **{key: last[key] for key in ("epsilon", "delta") if key in last},
        **({"clients": spreads} if (spreads := client_spreads(best)) else {}),
        **({"groups": groups} if (groups := _group_values(best)) else {}),
        "to_target": None if target is None else to_target(history, target),
    }


def _group_values(row: "Row") -> dict[str, dict[str, float | None]]:
    """Return the values of each metric that reports show on the groups of test examples."""
    shown = {metric.name: row.get(metric.group_key) for metric in shown_in(row)}
    return {name: values for name, values in shown.items() if values}


def metric_keys(summary: Mapping[str, Any]) -> list[str]:
    """Return the keys of a summary that hold metrics."""
    return [key for key in summary if key.startswith(("test_", "final_test_"))]


def best_row(history: "Sequence[Row]") -> "Row":
    """Return the row of the best round, the earliest of equals."""
    metric = headline(history)
    by = metric.validation_key if metric.validation_key in history[0] else metric.test_key
    # max keeps the first of equals
    return max(history, key=lambda row: metric.rank(row.get(by)))


def last_judged(history: "Sequence[Row]") -> "Row":
    """Return the last row of a round that was evaluated."""
    key = headline(history).test_key
    return next((row for row in reversed(history) if key in row), history[-1])


def to_target(history: "Sequence[Row]", target: float | str) -> dict[str, Any] | None:
    """Return number and costs of the first round that reaches the target on the test set; None if
    there is no such round.
    """
    costs = cost_of(history, read_target(target, headline(history)))
    return None if costs is None else {"target": target, **costs}


def cost_of(history: "Sequence[Row]", target: Target) -> dict[str, Any] | None:
    """Return number and costs of the first round that reaches the target, or None."""
    row = next(filter(target.is_reached, history), None)
    return None if row is None else {key: row[key] for key in ("round", *COSTS)}


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and population standard deviation, as in the paper's tables."""
    return statistics.fmean(values), statistics.pstdev(values)
