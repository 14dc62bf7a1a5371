"""Experiments -> runs on disk. Finished runs are left alone, unfinished runs are continued."""

import logging
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from feddkd.engines.batched.engine import PRECISIONS
from feddkd.engines.interface import EngineFactory
from feddkd.engines.select import accepts, check_engine, find_device
from feddkd.errors import InputError, unknown
from feddkd.experiment import Experiment
from feddkd.runs.continuation import abreast, finished
from feddkd.runs.description import describe_experiment
from feddkd.runs.files import DamagedRunError
from feddkd.runs.lock import BusyError
from feddkd.runs.prepare import Prepared, prepare
from feddkd.runs.record import folder_name
from feddkd.runs.recorder import Recorder
from feddkd.runs.session import OFTEN, Event, Every, RunBegun, RunEnded, Session, job

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class How:
    """The way in which runs are carried out. It changes their numbers only by rounding."""

    engine: str | EngineFactory = "auto"
    device: str = "cpu"
    options: Mapping[str, Any] = field(default_factory=dict)  # of a named engine
    data: Path | None = None  # folder with the data sets' files
    every: Every = OFTEN
    fresh: bool = False  # run again what is finished or was cut short
    until: int | None = None  # stop after this round, with a checkpoint


AS_USUAL = How()


def play(experiments: Sequence[Experiment], out: Path, how: How = AS_USUAL) -> Generator[Event]:
    """Run experiments that differ in their seeds alone, in lock-step; write their folders under
    `out` and yield events.

    Finished runs are left alone and unfinished runs are continued, unless `how.fresh`. Every run
    ends with a RunEnded. If a run could not go on, its summary has the reason, `ended`, and no
    numbers.
    """
    device = find_device(how.device)  # raises an error before anything is written
    check_engine(how.engine)
    folders = [out / folder_name(experiment) for experiment in experiments]
    todo = []
    for at, (experiment, folder) in enumerate(zip(experiments, folders, strict=True)):
        try:
            summary = None if how.fresh else finished(folder, experiment.digest)
        except DamagedRunError as error:
            yield RunEnded(at, _not_played(experiment, ended=str(error)))
            continue
        if summary is None:
            todo.append(at)
        else:
            Recorder(folder).tidy()
            yield RunEnded(at, summary)
    for group in abreast(
        [folders[at] for at in todo], [experiments[at].digest for at in todo], device, how.fresh
    ):
        prepared = [prepare(experiments[todo[n]], how.data) for n in group.members]
        for together in _one_program(prepared):
            numbers = [todo[group.members[n]] for n in together]
            chosen, ready = [experiments[at] for at in numbers], [prepared[n] for n in together]
            session = Session(
                job(chosen, ready),
                list(map(describe_experiment, chosen, ready)),
                [folders[at] for at in numbers],
                [group.snapshots[n] for n in together] if group.snapshots else [],
                how.every,
                how.until,
                how.fresh,
            )
            for event in session.play(how.engine, how.device, how.options):
                yield event._replace(at=numbers[event.at])


def play_all(
    experiments: Sequence[Experiment], places: Sequence[Path], how: How
) -> Generator[Event]:
    """Run experiments, each in a folder under its place; experiments that differ in their seeds
    alone run in lock-step.

    Several processes share the runs of a sweep: what another process writes is left to it, and
    looked at again in the end. If there is nothing else to do, a BusyError is raised.
    """
    busy, has_played = list[list[int]](), False
    for group in lock_step(experiments, places):
        try:
            for event in _play_group(group, experiments, places, how):
                has_played = has_played or isinstance(event, RunBegun)
                yield event
        except BusyError as error:
            log.info("%s; other runs come first", error)
            busy.append(group)
    for group in busy:
        try:
            yield from _play_group(group, experiments, places, how)
        except BusyError as error:
            if not has_played:
                raise
            log.warning("%s: it is left to that process", error)
            for at in group:
                yield RunEnded(at, _not_played(experiments[at]))


def _play_group(
    group: Sequence[int], experiments: Sequence[Experiment], places: Sequence[Path], how: How
) -> Generator[Event]:
    """Run the experiments at these positions in lock-step."""
    for event in play([experiments[at] for at in group], places[group[0]], how):
        yield event._replace(at=group[event.at])


def execute(experiments: Sequence[Experiment], *, out: Path, **how: Any) -> list[dict[str, Any]]:
    """Run experiments that differ in their seeds alone and return their summaries; `how` are the
    fields of `How`.
    """
    ended = {
        event.at: event.summary
        for event in play(experiments, out, How(**how))
        if isinstance(event, RunEnded)
    }
    return [ended[at] for at in range(len(experiments))]


def _not_played(experiment: Experiment, **why: str) -> dict[str, Any]:
    """Return the summary of a run that is not played."""
    run = {"digest": experiment.digest, "method": experiment.method, "seed": experiment.seed}
    return {**run, "rounds": 0, **why}


def _one_program(prepared: Sequence[Prepared]) -> list[list[int]]:
    """Return groups of runs that one program can compute, as positions.

    Seeds whose networks differ in frozen weights are in different groups.
    """
    alike: list[list[int]] = []
    for at, ready in enumerate(prepared):
        for group in alike:
            if prepared[group[0]].model.is_alike(ready.model):
                group.append(at)
                break
        else:
            alike.append([at])
    return alike


def in_precision(
    experiments: Sequence[Experiment], precision: str | None, engine: str, device: str
) -> tuple[list[Experiment], dict[str, Any]]:
    """Return experiments in the precision of `--precision`, and the engine's options.

    fp64 changes the dtype of the experiments, and is recorded so. The other precisions are ways in
    which an engine multiplies float32.
    """
    if precision == "fp64":
        exact = [replace(experiment, dtype="float64") for experiment in experiments]
        if len({experiment.digest for experiment in exact}) < len(exact):
            raise InputError(
                "precision 'fp64' makes experiments of the sweep the same, since they differ in"
                " their dtype alone"
            )
        return exact, {}
    if precision is None:
        return list(experiments), {}
    if precision not in PRECISIONS:
        raise unknown(f"unknown precision {precision!r}", precision, (*PRECISIONS, "fp64"))
    if any(experiment.dtype == "float64" for experiment in experiments):
        raise InputError(
            f"precision {precision!r} is for experiments of dtype float32; one of these is of"
            " float64"
        )
    if precision == "tf32" and device == "cpu":
        raise InputError("precision 'tf32' needs a GPU; on a CPU there are: bf16, fp32, fp64")
    # every engine on a CPU computes in fp32
    if (
        precision == "fp32"
        and device == "cpu"
        and (engine == "auto" or not accepts(engine, "precision"))
    ):
        return list(experiments), {}
    if not accepts(engine, "precision"):
        raise InputError(
            f"engine {engine!r} computes in the experiment's dtype and knows no precision"
            f" {precision!r}"
        )
    return list(experiments), {"precision": precision}


def lock_step(experiments: Sequence[Experiment], places: Sequence[Path]) -> list[list[int]]:
    """Return groups of experiments that run as one program, as positions: they differ in their
    seeds alone and are recorded in the same place.
    """
    families: dict[tuple[str, Path], list[int]] = {}
    for at, (experiment, place) in enumerate(zip(experiments, places, strict=True)):
        families.setdefault((experiment.family, place), []).append(at)
    return list(families.values())
