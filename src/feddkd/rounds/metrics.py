"""Metrics: the numbers that are measured of a model on labelled examples.

A metric adds up named sums over examples and makes one number from the sums. Sums of batches and of
clients can be added, so every engine can fold them. A new metric is one `Metric` in this file:
rows, summaries, tables, curves and pages read its declaration.

The module imports no torch, so that commands which only read records start quickly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from feddkd.errors import InputError, unknown

if TYPE_CHECKING:
    from torch import Tensor

    from feddkd.method import Batch
    from feddkd.tensors import Tensors


@dataclass(frozen=True)
class Metric:
    """A number that is measured of a model, and how it is shown.

    `sums` gets the logits (batch, outputs) and the batch, and returns named float64 tensors, which
    are added over batches. It must be pure and must not branch on a tensor: engines vmap, trace and
    record it. Padding has share 0 and must add nothing. `value` gets the sums, with any number of
    leading axes, and returns a tensor with these axes.
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


def register(metric: Metric) -> Metric:
    """Add a metric to those that experiments can ask for, and return it."""
    if not re.fullmatch(r"(?!client_)[a-z][a-z0-9_]*", metric.name):
        raise InputError(f"{metric.name!r} is no name of a metric: use a-z, 0-9 and _")
    if metric.name in METRICS:
        raise InputError(f"there is a metric {metric.name!r} already")
    METRICS[metric.name] = metric
    return metric


def find_metrics(asked: Sequence[str | Metric] | None) -> tuple[Metric, ...]:
    """Return metrics by their names, the headline first; None stands for the default."""
    if asked is None:
        return DEFAULT
    if isinstance(asked, str) or not isinstance(asked, Sequence) or not asked:
        raise InputError(f'metrics must be a list of names, as in ["accuracy"], not {asked!r}')
    found = tuple(map(_find, asked))
    if len({metric.name for metric in found}) < len(found):
        raise InputError(f"metrics names one twice: {', '.join(metric.name for metric in found)}")
    return found


def _find(asked: Any) -> Metric:
    if isinstance(asked, Metric):
        if METRICS.get(asked.name, asked) is not asked:
            raise InputError(f"there is another metric {asked.name!r} already; choose a new name")
        return asked
    if not isinstance(asked, str) or asked not in METRICS:
        raise unknown(f"unknown metric {asked!r}", asked, METRICS)
    return METRICS[asked]


def metrics_in(row: Mapping[str, Any]) -> list[Metric]:
    """Return the metrics that a row of a record holds, in their order."""
    names = [key.removeprefix("test_") for key in row if key.startswith("test_")]
    return [METRICS[name] for name in names if name in METRICS]


def headline(history: Sequence[Mapping[str, Any]]) -> Metric:
    """Return the metric by which a run is judged: the first one in its first row."""
    return next(iter(metrics_in(history[0])), ACCURACY)


def shown_in(row: Mapping[str, Any]) -> list[Metric]:
    """Return the metrics of a row that reports show: the headline, and those made for tables."""
    first, *others = metrics_in(row) or [ACCURACY]
    return [first, *(metric for metric in others if metric.in_tables)]


# --- the metrics


def _present(batch: Batch) -> Tensor:
    """Return 1 for each example and 0 for padding."""
    return (batch.share > 0).double()


def _accuracy_sums(logits: Tensor, batch: Batch) -> Tensors:
    present = _present(batch)
    correct = ((logits.argmax(-1) == batch.y) * present).sum()
    return {"correct": correct, "count": present.sum()}


def _loss_sums(logits: Tensor, batch: Batch) -> Tensors:
    from feddkd.methods.losses import cross_entropy

    count = _present(batch).sum()
    return {"sum": cross_entropy(logits, batch).double() * count, "count": count}


def _macro_f1_sums(logits: Tensor, batch: Batch) -> Tensors:
    """Return true positives, false positives and false negatives of each class."""
    classes = logits.shape[-1]
    true = batch.marks(classes).double()
    taken = batch._replace(y=logits.argmax(-1)).marks(classes).double()
    hits = (true * taken).sum(0)
    return {
        "true_positive": hits,
        "false_positive": taken.sum(0) - hits,
        "false_negative": true.sum(0) - hits,
    }


def _macro_f1(sums: Tensors) -> Tensor:
    """1/|C| sum_c 2 TP_c / (2 TP_c + FP_c + FN_c), C: classes that are a label or a prediction."""
    hits = 2 * sums["true_positive"]
    total = hits + sums["false_positive"] + sums["false_negative"]
    return (hits / total.clamp(min=1)).sum(-1) / (total > 0).sum(-1)


BINS = 1024  # of AUC's histograms


def _auc_sums(logits: Tensor, batch: Batch) -> Tensors:
    """Return histograms of each class's softmax probability, over its examples and the others."""
    classes = logits.shape[-1]
    true, bins = batch.marks(classes).double().T, _bin(logits).T
    empty = true.new_zeros(classes, BINS)
    return {
        "positive": empty.scatter_add(1, bins, true),
        "negative": empty.scatter_add(1, bins, _present(batch) - true),
    }


def _bin(logits: Tensor) -> Tensor:
    """Return the bin of each probability p, which depends on p and the number of classes alone.

    Bins have equal widths in asinh(10 (log p/(1-p) + log(C-1))), from -10 to 10: .002 of the
    log-odds near p = 1/C, where an untrained network is, and 2 % of them far away, where a trained
    one is. Numbers that are not finite count as p = 1/C.
    """
    log_p = logits.double().log_softmax(-1)
    odds = log_p - (-log_p.expm1()).log() + math.log(max(logits.shape[-1] - 1, 1))
    place = (10 * odds).nan_to_num(0.0, 1e9, -1e9).asinh().clamp(-10, 10)
    return ((place + 10) * (BINS / 20)).long().clamp(max=BINS - 1)


def _auc(sums: Tensors) -> Tensor:
    """Return the mean of one-vs-rest AUCs over the classes with both kinds of examples.

    AUC_c = P(p_c of a positive > p_c of a negative) + 1/2 P(both are in one bin). NaN without such
    a class. The error against an exact computation is below .001.
    """
    positive, negative = sums["positive"], sums["negative"]
    below = negative.cumsum(-1) - negative / 2
    pairs = positive.sum(-1) * negative.sum(-1)
    each = (positive * below).sum(-1) / pairs.clamp(min=1)
    return each.sum(-1) / (pairs > 0).sum(-1)


ACCURACY = register(
    Metric("accuracy", "accuracy", _accuracy_sums, lambda sums: sums["correct"] / sums["count"])
)
LOSS = register(
    Metric(
        "loss",
        "loss",
        _loss_sums,
        lambda sums: sums["sum"] / sums["count"],
        higher_is_better=False,
        percent=False,
        by_client=False,
        in_tables=False,
    )
)
register(Metric("macro_f1", "macro-F1", _macro_f1_sums, _macro_f1))
register(Metric("auc", "AUC", _auc_sums, _auc, skips_undefined=True))
DEFAULT = (ACCURACY, LOSS)
