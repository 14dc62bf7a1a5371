"""A run's rows -> the numbers people quote, each by a named rule."""

import statistics
from collections.abc import Sequence
from typing import Any

from feddkd.rounds.loop import Row

COSTS = ("communications", "local_steps", "bytes_up", "bytes_down")


def summarise(history: Sequence[Row], target: float | None = None) -> dict[str, Any]:
    """Test accuracy at the best validation round and at the end, what the run cost, and what the
    target cost.

    Without a validation set the best round is picked by test accuracy, and `selection` says so:
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
    """Round and costs at the first round whose test accuracy is at least the target; None if it
    never is.
    """
    reached = next((row for row in history if row["test_accuracy"] >= target), None)
    return (
        None
        if reached is None
        else {
            "target": target,
            "round": reached["round"],
            **{cost: reached[cost] for cost in COSTS},
        }
    )


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and population standard deviation, as in the paper's tables."""
    return statistics.fmean(values), statistics.pstdev(values)
