"""Summaries: the numbers that people quote of a run, each by a named rule."""

import statistics
from collections.abc import Sequence
from typing import Any

from feddkd.runs.record import Row

COSTS = ("communications", "local_steps", "bytes_up", "bytes_down")


def summarise(history: Sequence[Row], target: float | None = None) -> dict[str, Any]:
    """Return test accuracy at the best validation round and at the end, and costs.

    Without a validation set the best round is chosen by test accuracy, and `selection` says so:
    such a number is an upper bound.
    """
    by = "validation_accuracy" if "validation_accuracy" in history[0] else "test_accuracy"
    # max keeps the first of equals: the earliest round
    best = max(history, key=lambda row: row[by])
    last = history[-1]
    return {
        "rounds": last["round"],
        "test_accuracy": best["test_accuracy"],
        "best_round": best["round"],
        "selection": "best validation round"
        if by == "validation_accuracy"
        else "best test round: no validation set",
        "final_test_accuracy": last["test_accuracy"],
        **{cost: last[cost] for cost in COSTS},
        **{key: last[key] for key in ("epsilon", "delta") if key in last},
        "to_target": None if target is None else to_target(history, target),
    }


def to_target(history: Sequence[Row], target: float) -> dict[str, Any] | None:
    """Return the round and the costs at which the test accuracy first is at least the target; None
    if it never is.
    """
    reached = next((row for row in history if row["test_accuracy"] >= target), None)
    if reached is None:
        return None
    costs = {cost: reached[cost] for cost in COSTS}
    return {"target": target, "round": reached["round"], **costs}


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and population standard deviation, as in the paper's tables."""
    return statistics.fmean(values), statistics.pstdev(values)
