"""Compare two experiments key by key, down to the options of their methods, and their results seed
by seed.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from feddkd.reports.columns import TableColumn, metric_columns
from feddkd.reports.statistics import Paired, paired
from feddkd.runs.record import Record

if TYPE_CHECKING:  # the command loads torch only if it needs experiments
    from feddkd.experiment import Experiment
    from feddkd.spec.registry import Call, Spelled

RUN_KEYS = ("seed", "split_seed")  # in which the runs of one experiment differ


def differences(a: "Experiment", b: "Experiment") -> dict[str, tuple[Any, Any]]:
    """Return the two values of each key that differs, without the seeds; None where an experiment
    lacks the key.

    Texts of calls are compared call by call, and calls option by option, whatever their names.
    """
    values: dict[str, tuple[Any, Any]] = {}
    first, second = _spelled(a), _spelled(b)
    for key in {**a.canonical, **b.canonical}:
        if key in first:
            if first[key] != second[key]:  # compared by meaning, not by spelling
                values[key] = str(first[key]), str(second[key])
                values |= _options(key, first[key].calls, second[key].calls)
        elif key not in RUN_KEYS:
            values[key] = a.canonical.get(key), b.canonical.get(key)
    return {key: (left, right) for key, (left, right) in values.items() if left != right}


def _options(
    key: str, first: "Sequence[Call]", second: "Sequence[Call]"
) -> dict[str, tuple[Any, Any]]:
    """Return both values of every option, call by call."""
    values: dict[str, tuple[Any, Any]] = {}
    several = max(len(first), len(second)) > 1
    for number, (left, right) in enumerate(zip(first, second, strict=False), 1):
        ours, theirs = dict(left.complete), dict(right.complete)
        where = f"{key} {number}" if several else key
        for option in {**ours, **theirs}:
            values[f"{where}, {option}"] = ours.get(option), theirs.get(option)
    return values


def _spelled(experiment: "Experiment") -> "dict[str, Spelled]":
    from feddkd.data.transforms import transform

    return {
        "method": experiment.parsed_method,
        "data": experiment.parsed_data,
        "partition": experiment.parsed_partition,
        "model": experiment.architecture,
        "transform": transform(experiment.transform_text),
    }


def against(a: Sequence[Record], b: Sequence[Record]) -> dict[str, Paired | None]:
    """Return the paired test of b less a for each column of metrics, in the metric's unit, over the
    seeds that both have.
    """
    tests = {}
    for column in metric_columns([*a, *b]):
        ours, theirs = (_by_seed(column, records) for records in (a, b))
        if ours or theirs:
            tests[column.name] = paired(theirs, ours)
    return tests


def _by_seed(column: TableColumn, records: Sequence[Record]) -> dict[int, float]:
    """Return the column's value for each seed; nothing if a seed lacks it."""
    seeds = [record.manifest["canonical"]["seed"] for record in records]
    values = column.values(records)
    if len(values) != len(seeds):
        return {}
    return {seed: column.scale * value for seed, value in zip(seeds, values, strict=True)}
