"""Experiments -> runs on disk: load the data, divide it, play the rounds, write the record."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feddkd.data.examples import Data
from feddkd.data.federation import Federation, divide
from feddkd.data.partition import Split
from feddkd.data.registry import Source
from feddkd.data.transforms import transform
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
    experiment: Experiment,
    *,
    out: Path,
    folder: Path | None = None,
    engine: str = "serial",
    device: str = "cpu",
    on_row: Callable[[Row], None] = lambda row: None,
) -> dict[str, Any]:
    """Run one experiment, write its folder under `out`, and return its summary."""
    place, _ = find_device(device), find_engine(engine)  # complain before anything is written
    prepared = prepare(experiment, folder)
    recorder = Recorder(out / folder_name(experiment))
    recorder.open(
        describe(
            experiment,
            engine=engine,
            device=place,
            data={"name": prepared.data.name, "digest": prepared.data.digest, "note": prepared.data.note},
            partition={"digest": prepared.split.digest, "sizes": prepared.federation.sizes},
            parameters=sum(tensor.numel() for tensor in prepared.model.net.parameters()),
        )
    )
    history: list[Row] = []
    began = last = time.perf_counter()

    def on_round(rows: list[Row]) -> None:
        nonlocal last
        now = time.perf_counter()
        history.append(rows[0])
        recorder.row(rows[0], now - last)
        last = now
        on_row(rows[0])

    try:
        run = simulate_runs(
            prepared.model, experiment.parsed_method, [prepared.federation],
            [prepared.model.initial(("init", experiment.seed))], [experiment.seed],
            rounds=experiment.rounds, cohort=experiment.cohort, protocol=experiment.protocol,
            engine=engine, device=device, dtype=DTYPES[experiment.dtype], on_round=on_round,
        )[0]  # fmt: skip
        Result({**run.state["params"], **run.state["buffers"]}, history).save(recorder.folder / "final.safetensors")
        summary = {
            "digest": experiment.digest,
            "method": experiment.method,
            "seed": experiment.seed,
            **summarise(history, experiment.target),
            "seconds": round(time.perf_counter() - began, 3),
        }
        recorder.finish(summary)
        return summary
    finally:
        recorder.close()
