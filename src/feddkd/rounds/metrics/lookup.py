"""Metrics by name, and the metrics that the rows of a run hold."""

from collections.abc import Mapping, Sequence
from typing import Any

from feddkd.errors import InputError, unknown
from feddkd.rounds.metrics.classification import ACCURACY, LOSS
from feddkd.rounds.metrics.metric import METRICS, OWN, Metric, check_name, known
from feddkd.rounds.metrics.whole import is_object, of_object

DEFAULT = (ACCURACY, LOSS)
SUCCESS_KEY = "attack_success"  # of a row: the accuracy on examples labelled as the attack wants


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
    asked = of_object(asked) if is_object(asked) else asked
    if isinstance(asked, Metric):
        if METRICS.get(asked.name, asked) is not asked:
            raise InputError(f"there is another metric {asked.name!r} already; choose a new name")
        check_name(asked)
        if asked.name not in METRICS:
            OWN[asked.name] = asked
        return asked
    if not isinstance(asked, str) or asked not in METRICS:
        raise unknown(f"unknown metric {asked!r}", asked, METRICS)
    return METRICS[asked]


def metrics_in(row: Mapping[str, Any]) -> list[Metric]:
    """Return the metrics that a row of a record holds, in their order."""
    names = [key.removeprefix("test_") for key in row if key.startswith("test_")]
    return [metric for metric in map(known, names) if metric is not None]


def headline(history: Sequence[Mapping[str, Any]]) -> Metric:
    """Return the metric by which a run is judged: the first one in its first row."""
    return next(iter(metrics_in(history[0])), ACCURACY)


def shown_in(row: Mapping[str, Any]) -> list[Metric]:
    """Return the metrics of a row that reports show: the headline, and those made for tables."""
    first, *others = metrics_in(row) or [ACCURACY]
    return [first, *(metric for metric in others if metric.in_tables)]
