"""Two experiments key by key, down to the options of their methods; and what came out of them, seed
by seed.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from feddkd.reports.statistics import Paired, paired
from feddkd.reports.tables import accuracies
from feddkd.runs.record import Record

if TYPE_CHECKING:  # the command loads torch only if it needs experiments
    from feddkd.experiment import Experiment
    from feddkd.spec.registry import Call, Spelled

OF_A_RUN = ("seed", "split_seed")  # what seeds of one experiment differ in


def differences(a: "Experiment", b: "Experiment") -> dict[str, tuple[Any, Any]]:
    """Key -> the two values, for all that differ but the seed; None where an experiment has no such
    key.

    Texts of calls are compared call by call, and calls option by option, whatever their names.
    """
    found: dict[str, tuple[Any, Any]] = {}
    first, second = _spelled(a), _spelled(b)
    for key in {**a.canonical, **b.canonical}:
        if key in first:
            if first[key] != second[key]:  # by what they mean, not by how they are spelled
                found |= {
                    key: (str(first[key]), str(second[key])),
                    **_options(key, first[key].calls, second[key].calls),
                }
        elif key not in OF_A_RUN:
            found[key] = a.canonical.get(key), b.canonical.get(key)
    return {key: (one, other) for key, (one, other) in found.items() if one != other}


def _options(
    key: str, first: "Sequence[Call]", second: "Sequence[Call]"
) -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    for number, (one, other) in enumerate(zip(first, second, strict=False), 1):
        ours, theirs = dict(one.complete), dict(other.complete)
        place = f"{key} {number}" if max(len(first), len(second)) > 1 else key
        found |= {
            f"{place}, {option}": (ours.get(option), theirs.get(option))
            for option in {**ours, **theirs}
        }
    return found


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
    """By the table's column: b less a in points, over the seeds that both have."""
    first, second = _by_seed(a), _by_seed(b)
    return {
        column: paired(second.get(column, {}), first.get(column, {}))
        for column in {**first, **second}
    }


def _by_seed(records: Sequence[Record]) -> dict[str, dict[int, float]]:
    seeds = [record.manifest["canonical"]["seed"] for record in records]
    known = {
        column: values
        for column, values in accuracies(records).items()
        if len(values) == len(seeds)
    }
    return {
        column: {seed: 100 * value for seed, value in zip(seeds, values, strict=True)}
        for column, values in known.items()
    }
