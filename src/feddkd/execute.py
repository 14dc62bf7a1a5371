"""Experiments -> runs on disk: load the data, divide it, play the rounds, write the record."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from feddkd.data.examples import Data
from feddkd.data.federation import Federation, divide
from feddkd.data.partition import Split
from feddkd.data.registry import Source
from feddkd.data.transforms import transform
from feddkd.engines.batched import PRECISIONS
from feddkd.errors import InputError, choices
from feddkd.experiment import Experiment
from feddkd.models import Model, functional
from feddkd.record import Recorder, describe, folder_name
from feddkd.rounds import Row
from feddkd.simulation import DTYPES, Result, find_device, find_engine, simulate_runs
from feddkd.summary import summarise


@dataclass(frozen=True)
class Prepared:
    """An experiment with its data loaded and divided and its network built."""

    data: Data
    split: Split
    federation: Federation
    model: Model


@functools.lru_cache(maxsize=1)
def _load(source: Source, folder: Path | None) -> Data:
    """The runs of a sweep mostly share their data: read and check it once."""
    return source.load(folder)


def prepare(experiment: Experiment, folder: Path | None) -> Prepared:
    data = _load(experiment.parsed_data, folder)
    federation, split = divide(
        data,
        experiment.parsed_partition,
        transform(experiment.transform_text, data.scale),
        clients=experiment.clients,
        training=experiment.training,
        validation=experiment.validation,
        key=(experiment.seed if experiment.split_seed is None else experiment.split_seed,),
    )
    return Prepared(data, split, federation, functional(experiment.architecture.build(federation.shape, data.classes)))


def execute(
    experiments: Sequence[Experiment],
    *,
    out: Path,
    folder: Path | None = None,
    engine: str = "auto",
    device: str = "cpu",
    options: Mapping[str, Any] | None = None,
    on_row: Callable[[int, Row], None] = lambda index, row: None,
) -> list[dict[str, Any]]:
    """Run experiments that differ in their seed alone, in lock-step; write their folders under `out`, return their summaries."""
    place = find_device(device)  # complain before anything is written
    if engine != "auto":
        find_engine(engine)
    first = experiments[0]
    prepared = [prepare(experiment, folder) for experiment in experiments]
    recorders = [Recorder(out / folder_name(experiment)) for experiment in experiments]
    for experiment, ready, recorder in zip(experiments, prepared, recorders, strict=True):
        recorder.open(_manifest(experiment, ready, engine, place))
    histories: list[list[Row]] = [[] for _ in experiments]
    began = last = time.perf_counter()

    def on_round(rows: list[Row]) -> None:
        nonlocal last
        now = time.perf_counter()
        for index, row in enumerate(rows):
            histories[index].append(row)
            recorders[index].row(row, (now - last) / len(rows))
            on_row(index, row)
        last = now

    try:
        runs, facts = simulate_runs(
            prepared[0].model, first.parsed_method, [ready.federation for ready in prepared],
            [ready.model.initial(("init", e.seed)) for ready, e in zip(prepared, experiments, strict=True)],
            [experiment.seed for experiment in experiments],
            rounds=first.rounds, cohort=first.cohort, protocol=first.protocol, engine=engine, device=device,
            dtype=DTYPES[first.dtype], on_round=on_round, options=options,
        )  # fmt: skip
        seconds = round((time.perf_counter() - began) / len(runs), 3)
        return [
            _finish(experiment, recorder, Result({**run.state["params"], **run.state["buffers"]}, history), seconds, facts)
            for experiment, recorder, run, history in zip(experiments, recorders, runs, histories, strict=True)
        ]
    finally:
        for recorder in recorders:
            recorder.close()


def _manifest(experiment: Experiment, ready: Prepared, engine: str, device: torch.device) -> dict[str, Any]:
    return describe(
        experiment,
        engine=engine,
        device=device,
        data={"name": ready.data.name, "digest": ready.data.digest, "note": ready.data.note},
        partition={"digest": ready.split.digest, "sizes": ready.federation.sizes},
        parameters=sum(tensor.numel() for tensor in ready.model.net.parameters()),
    )


def _finish(experiment: Experiment, recorder: Recorder, result: Result, seconds: float, facts: dict[str, Any]) -> dict[str, Any]:
    result.save(recorder.folder / "final.safetensors")
    summary = {
        "digest": experiment.digest,
        "method": experiment.method,
        "seed": experiment.seed,
        **summarise(result.history, experiment.target),
        "seconds": seconds,
    }
    recorder.finish(summary, facts)
    return summary


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


def lock_step(experiments: Sequence[Experiment]) -> list[list[int]]:
    """Positions of experiments that can run as one program: the same but for the seed."""
    families: dict[str, list[int]] = {}
    for at, experiment in enumerate(experiments):
        families.setdefault(experiment.family, []).append(at)
    return list(families.values())
