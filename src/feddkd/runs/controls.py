"""Experiments beside one with DKD that ask what its lead comes from.

The method without DKD, with as many rounds, communications, local steps, operations and bytes; and
DKD with other teachers (methods/teachers.py). Where a run has other rounds, the rate's decay is
such that it falls as far from the first round to the last.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from feddkd.errors import InputError
from feddkd.experiment import Experiment
from feddkd.runs.run_costs import RunCosts, run_costs
from feddkd.spec.registry import Call

TEACHERS = {
    "labels": "labels in the teachers' place",
    "shuffled": "shuffled teachers",
    "average": "the average as teacher",
}
COSTS = {
    "communications": "communications",
    "bytes": "bytes",
    "steps": "local steps",
    "operations": "compute",
}


@dataclass(frozen=True)
class Control:
    """An experiment, which has a name, and what a run of it costs."""

    experiment: Experiment
    costs: RunCosts


def controls(experiment: Experiment, folder: Path | None) -> list[Control]:
    """Return an experiment with DKD, and then its controls."""
    calls = experiment.parsed_method.calls
    plain = [call for call in calls if call.name != "dkd"]
    if not has_dkd(experiment) or not any(map(_trains, plain)):
        raise InputError(
            f"controls need a method that trains locally and dkd() after it, as in"
            f" fedavg() | dkd(); not {experiment.method!r}"
        )
    name = " | ".join(call.name for call in calls)
    made = [replace(experiment, name=name)]
    made += _without_dkd(experiment, plain, folder)
    made += [
        replace(
            experiment,
            method=_spelled(_taught(call, teacher) for call in calls),
            name=f"{name}, {label}",
        )
        for teacher, label in TEACHERS.items()
    ]
    different = {one.digest: one for one in reversed(made)}  # of equals the first
    return [Control(one, run_costs(one, folder)) for one in reversed(different.values())]


def has_dkd(experiment: Experiment) -> bool:
    """Return True if DKD follows another method, and is no control itself."""
    after = (call for call in experiment.parsed_method.calls[1:] if call.name == "dkd")
    return any(dict(call.complete)["teacher"] not in TEACHERS for call in after)


def _without_dkd(
    experiment: Experiment, plain: list[Call], folder: Path | None
) -> list[Experiment]:
    """Return the method without DKD at equal rounds, and at equal costs."""
    name = " | ".join(call.name for call in plain)
    base = replace(experiment, method=_spelled(plain))
    whole, part = run_costs(experiment, folder), run_costs(base, folder)
    by_rounds = {experiment.rounds: ["rounds"]}
    for cost, words in COSTS.items():
        rounds = round(experiment.rounds * getattr(whole, cost) / getattr(part, cost))
        by_rounds.setdefault(rounds, []).append(words)
    made = [
        _longer(base, plain, rounds, f"{name}, equal {' and '.join(words)}")
        for rounds, words in by_rounds.items()
    ]
    rounds = round(experiment.rounds * whole.communications / part.communications)
    steps = max(1, round(whole.steps / rounds))
    short = [_with(call, ("epochs",), steps=steps) if _trains(call) else call for call in plain]
    both = f"{name}, equal communications and local steps"
    return [*made, _longer(base, short, rounds, both)]


def _longer(base: Experiment, calls: list[Call], rounds: int, name: str) -> Experiment:
    """Return an experiment with these calls and this number of rounds."""
    slower = [_slower(call, base.rounds / rounds) for call in calls]
    return replace(base, method=_spelled(slower), rounds=rounds, name=name)


def _slower(call: Call, share: float) -> Call:
    """Return a call whose rate decays by this share of the decay in each round."""
    decay = dict(call.complete).get("lr_decay")
    if not isinstance(decay, float) or decay == 1.0:
        return call
    return _with(call, lr_decay=round(decay**share, 8))


def _trains(call: Call) -> bool:
    """Return True if a method trains locally, by epochs or by steps."""
    return {"epochs", "steps", "lr_decay"} <= dict(call.complete).keys()


def _taught(call: Call, teacher: str) -> Call:
    """Return a call of dkd with another teacher; labels have no divergence."""
    if call.name != "dkd":
        return call
    drop = ("divergence", "temperature") if teacher == "labels" else ()
    return _with(call, drop, teacher=teacher)


def _with(call: Call, drop: tuple[str, ...] = (), **options: Any) -> Call:
    given: Mapping[str, Any] = {**dict(call.given), **options}
    return replace(call, given=tuple(item for item in given.items() if item[0] not in drop))


def _spelled(calls: Any) -> str:
    return " | ".join(map(str, calls))
