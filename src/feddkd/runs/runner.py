"""Experiments -> runs on disk. What is finished is left alone, what was cut short goes on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from feddkd.engines.batched.engine import PRECISIONS
from feddkd.engines.select import find_device, find_engine
from feddkd.errors import InputError, choices
from feddkd.experiment import Experiment
from feddkd.runs.prepare import Prepared, prepare
from feddkd.runs.record import finished_summary, folder_name
from feddkd.runs.recorder import Recorder
from feddkd.rounds.loop import Row
from feddkd.runs.session import OFTEN, Every, Session, abreast


def execute(
    experiments: Sequence[Experiment],
    *,
    out: Path,
    folder: Path | None = None,
    engine: str = "auto",
    device: str = "cpu",
    options: Mapping[str, Any] | None = None,
    on_row: Callable[[int, Row], None] = lambda index, row: None,
    every: Every = OFTEN,
    fresh: bool = False,
    until: int | None = None,
) -> list[dict[str, Any]]:
    """Run experiments that differ in their seed alone, in lock-step; write their folders under `out`, return their summaries.
    That of a run that could not go on has the reason, `ended`, and no numbers.

    Finished runs are left as they are, and those that were cut short go on, unless `fresh`. `until` stops those that have not
    come so far after that round, with a checkpoint.
    """
    place = find_device(device)  # complain before anything is written
    if engine != "auto":
        find_engine(engine)
    folders = [out / folder_name(experiment) for experiment in experiments]
    done = (
        {} if fresh else {at: summary for at, e in enumerate(experiments) if (summary := finished_summary(folders[at], e.digest))}
    )
    for at in done:
        Recorder(folders[at]).tidy()
    todo = [at for at in range(len(experiments)) if at not in done]
    for group in abreast([folders[at] for at in todo], [experiments[at].digest for at in todo], place, fresh):
        prepared = [prepare(experiments[todo[n]], folder) for n in group.members]
        for together in _one_program(prepared):
            numbers = [todo[group.members[n]] for n in together]
            session = Session(
                [experiments[at] for at in numbers], [folders[at] for at in numbers], [prepared[n] for n in together],
                [group.snapshots[n] for n in together] if group.snapshots else [], every, until,
            )  # fmt: skip
            told = _renumbered(on_row, numbers)
            done |= dict(zip(numbers, session.run(engine, device, options, told), strict=True))
    return [done[at] for at in range(len(experiments))]


def _one_program(prepared: Sequence[Prepared]) -> list[list[int]]:
    """Return positions of runs that one program can compute: seeds may differ in frozen weights, and those go one by one."""
    alike: list[list[int]] = []
    for at, ready in enumerate(prepared):
        family = next((family for family in alike if prepared[family[0]].model.is_alike(ready.model)), None)
        if family is None:
            alike.append([at])
        else:
            family.append(at)
    return alike


def _renumbered(on_row: Callable[[int, Row], None], numbers: Sequence[int]) -> Callable[[int, Row], None]:
    return lambda index, row: on_row(numbers[index], row)


def in_precision(
    experiments: Sequence[Experiment], precision: str | None, engine: str, device: str
) -> tuple[list[Experiment], dict[str, Any]]:
    """Experiments as `--precision` asks for, and what the engine is to be told: fp64 is the experiment's own dtype, and so
    recorded; the others are how an engine multiplies float32."""
    if precision == "fp64":
        exact = [replace(experiment, dtype="float64") for experiment in experiments]
        if len({experiment.digest for experiment in exact}) < len(exact):
            raise InputError("precision 'fp64' makes experiments of the sweep the same, since they differ in their dtype alone")
        return exact, {}
    if precision is None:
        return list(experiments), {}
    if precision not in PRECISIONS:
        raise InputError(f"unknown precision {precision!r}; there are: {choices((*PRECISIONS, 'fp64'))}")
    if any(experiment.dtype == "float64" for experiment in experiments):
        raise InputError(f"precision {precision!r} is for experiments of dtype float32; one of these is of float64")
    if precision == "tf32" and device == "cpu":
        raise InputError("precision 'tf32' is a GPU's; on a CPU there are: bf16, fp32, fp64")
    if precision == "fp32" and device == "cpu" and engine != "batched":  # where every engine computes so
        return list(experiments), {}
    if engine in ("serial", "pool"):
        raise InputError(
            f"engine {engine!r} computes in the experiment's dtype and knows no precision {precision!r}; 'batched' does"
        )
    return list(experiments), {"precision": precision}


def lock_step(experiments: Sequence[Experiment], places: Sequence[Path]) -> list[list[int]]:
    """Positions of experiments that can run as one program: the same but for the seed, and in the same place."""
    families: dict[tuple[str, Path], list[int]] = {}
    for at, (experiment, place) in enumerate(zip(experiments, places, strict=True)):
        families.setdefault((experiment.family, place), []).append(at)
    return list(families.values())
