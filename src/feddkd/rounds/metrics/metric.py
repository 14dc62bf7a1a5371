"""The value `Metric`, and the metrics by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from feddkd.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from feddkd.method import Batch
    from feddkd.tensors import Tensors


@dataclass(frozen=True)
class Metric:
    """A number that is measured of a model, and how it is shown.

    `sums` gets the network's output, batch first, and the batch, and returns named float64 tensors,
    which are added over batches. It must be pure and must not branch on a tensor: engines vmap,
    trace and record it. Padding has share 0 and must add nothing. It raises an InputError if the
    shapes are not those of its task. `value` gets the sums, with any number of leading axes, and
    returns a tensor with these axes; NaN where the sums hold nothing to judge.
    """

    name: str  # in rows ("test_<name>"), experiments and JSON
    title: str  # in tables and charts
    sums: Callable[[Tensor, Batch], Tensors]
    value: Callable[[Tensors], Tensor]
    higher_is_better: bool = True
    percent: bool = True  # shown in %, or else without a factor
    by_client: bool = True  # rows list the value of each client, if clients are judged one by one
    in_tables: bool = True  # summaries, tables and charts show it
    skips_undefined: bool = False  # clients for which it is NaN are left out of the mean
    # (all outputs, all targets) -> value, in place of sums: only for the global model
    whole: Callable[[Tensor, Any], float] | None = None

    @property
    def test_key(self) -> str:
        """The key in a row of its value on the test set."""
        return f"test_{self.name}"

    @property
    def validation_key(self) -> str:
        """The key in a row of its value on the validation set."""
        return f"validation_{self.name}"

    @property
    def average_key(self) -> str:
        """The key in a row of its value on the test set before DKD."""
        return f"average_test_{self.name}"

    @property
    def client_key(self) -> str:
        """The key in a row of its values on the clients' test sets."""
        return f"test_client_{self.name}"

    @property
    def group_key(self) -> str:
        """The key in a row of its values on the groups of test examples, by their names."""
        return f"{self.test_key}_by_group"

    @property
    def scale(self) -> int:
        """The factor between the value and the number that is shown."""
        return 100 if self.percent else 1

    @property
    def unit(self) -> str:
        """The unit of a value, with the space before it."""
        return " %" if self.percent else ""

    @property
    def difference_unit(self) -> str:
        """The unit of a difference between two values, with the space before it."""
        return " points" if self.percent else ""

    @property
    def digits(self) -> int:
        """The number of decimal places in tables."""
        return 2 if self.percent else 4

    @property
    def heading(self) -> str:
        """The title of a table or an axis with its values on the test set."""
        return f"test {self.title} in %" if self.percent else f"test {self.title}"

    def rank(self, value: float | None) -> float:
        """Return a number that is higher for a better value, and lowest for an undefined one."""
        if value is None or math.isnan(value):
            return -math.inf
        return value if self.higher_is_better else -value


METRICS: dict[str, Metric] = {}
# users' own: those that this process measures, and those that records it has read describe
OWN: dict[str, Metric] = {}
SHOWN = ("name", "title", "higher_is_better", "percent", "by_client", "in_tables")


def known(name: str) -> Metric | None:
    """Return the metric with this name, one of the package or a user's own."""
    return METRICS.get(name, OWN.get(name))


def own_facts(metrics: Sequence[Metric]) -> list[dict[str, Any]]:
    """Return what a record says of metrics that are not the package's: how to show them."""
    own = [metric for metric in metrics if metric.name not in METRICS]
    return [{key: getattr(metric, key) for key in SHOWN} for metric in own]


def read_own(facts: Sequence[Mapping[str, Any]]) -> None:
    """Make the metrics known that a record describes; they can be shown and not measured."""
    for each in facts:
        OWN.setdefault(each["name"], Metric(**each, sums=_cannot, value=_cannot))


def _cannot(*given: Any) -> Any:
    raise InputError("a metric that a record describes can be shown, and not measured")


def check_name(metric: Metric) -> None:
    """Raise InputError if the name of a metric cannot be part of a key in rows and targets."""
    if not re.fullmatch(r"(?!client_)[a-z][a-z0-9_]*", metric.name):
        raise InputError(f"{metric.name!r} is no name of a metric: use a-z, 0-9 and _")


def register(metric: Metric) -> Metric:
    """Add a metric to those that experiments can ask for, and return it."""
    check_name(metric)
    if metric.name in METRICS:
        raise InputError(f"there is a metric {metric.name!r} already")
    METRICS[metric.name] = metric
    return metric
