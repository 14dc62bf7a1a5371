"""Targets: a value of a metric on the test set, whose round and costs are reported.

A number is a value of the headline metric. A text names the metric: "rmse <= 0.3".
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from feddkd.errors import InputError, unknown
from feddkd.rounds.metrics.metric import METRICS, Metric, known

FORM = re.compile(r"\s*(?P<metric>\w+)\s*(?P<sign>[<>]=)\s*(?P<value>[-+.\w]+)\s*")


class Target(NamedTuple):
    """A value of a metric."""

    metric: Metric
    value: float
    text: str  # in tables

    def is_reached(self, row: Mapping[str, Any]) -> bool:
        """Return True if the metric of a row is as good as the target, or better."""
        if self.metric.test_key not in row:
            return False
        return self.metric.rank(row[self.metric.test_key]) >= self.metric.rank(self.value)


def read_target(given: float | str, headline: Metric) -> Target:
    """Return the target that a number or a text stands for; raise InputError if it is none."""
    if not isinstance(given, str):
        return Target(headline, given, f"{headline.scale * given:g}{headline.unit}")
    form = FORM.fullmatch(given)
    if form is None or not _is_number(form["value"]):
        raise InputError(f"target must be a number or a text such as 'rmse <= 0.3', not {given!r}")
    name, sign, value = form["metric"], form["sign"], float(form["value"])
    if (metric := known(name)) is None:
        raise unknown(f"target names an unknown metric {name!r}", name, METRICS)
    if sign != (right := ">=" if metric.higher_is_better else "<="):
        order = "higher" if metric.higher_is_better else "lower"
        raise InputError(f"target {given!r}: a {order} {name} is better, so write {right}")
    shown = f"{metric.scale * value:g}{metric.unit}"
    return Target(metric, value, f"{metric.title} {sign} {shown}")


def check_target(given: float | str | None, measured: Sequence[Metric]) -> None:
    """Raise InputError if a target is none, or none that rows with these metrics can reach."""
    if given is None:
        return
    metric, value, _ = read_target(given, measured[0])
    if metric not in measured:
        names = ", ".join(each.name for each in measured)
        raise InputError(
            f"target names {metric.name}, which is not measured: add it to metrics ({names})"
        )
    if metric.percent and not 0 < value <= 1:
        raise InputError(f"target must be > 0 and <= 1, not {value!r}")


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
