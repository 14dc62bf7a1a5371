"""Write papers/traces.json: for each job behind the committed records, what its first client reads
first, and what the network answers.

A job is data, their division, a network and a transform. A test computes the traces again, and
compares the records' digests of data and division. Traces of jobs whose data are not there are
kept: `python tools/measure/traces.py --data DIR`.
"""

import argparse
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from feddkd.engines.client import RunFold
from feddkd.engines.serial import Serial
from feddkd.errors import InputError
from feddkd.experiment import Experiment
from feddkd.method import Batch, Fold
from feddkd.models.functional import Model
from feddkd.papers.definitions import read
from feddkd.papers.results import RecordedRun, recorded
from feddkd.runs.prepare import prepare
from feddkd.runs.session import job
from feddkd.simulation import Simulation
from feddkd.tensors import Groups

ROOT = Path(__file__).parents[2]
FILE = ROOT / "papers" / "traces.json"
# the keys of an experiment's canonical form that make its job
KEYS = (
    *("data", "partition", "clients", "split_seed", "validation", "training", "public"),
    *("transform", "model", "shuffle"),
)


class FirstBatch(BaseException):
    """Ends a simulation where a client has its first mini-batch."""

    def __init__(self, model: Model, sent: Groups, batch: Batch) -> None:
        super().__init__()
        self.model, self.sent, self.batch = model, sent, batch


class Reading(Serial):
    """An engine that stops at the first mini-batch."""

    @property
    def _fold_runner(self) -> RunFold:
        def stop(
            model: Model, client: Fold, sent: Groups, carry: Groups, batches: Iterable[Batch]
        ) -> Groups:
            memo = self.memos.get((0, -1), self.first_memos[0])
            tensors = {**memo.get("private", {}), **sent["params"], **sent["buffers"]}
            raise FirstBatch(model, {"all": tensors}, next(iter(batches)))

        return stop


def runs() -> list[RecordedRun]:
    """Return all committed runs of all papers."""
    folders = sorted(path.parent for path in (ROOT / "papers").glob("*/tables.toml"))
    return [run for folder in folders for run in recorded(read(folder)).values()]


def job_of(run: RecordedRun) -> str:
    """Return the name of a run's job."""
    canonical = run.experiment.canonical
    return json.dumps([canonical.get(key) for key in KEYS])


def first_batch(experiment: Experiment, folder: Path | None) -> tuple[dict[str, str], FirstBatch]:
    """Return the digests of an experiment's data and division, and what a client reads first."""
    exact = replace(experiment, dtype="float64")
    prepared = prepare(exact, folder)
    digests = {"data": prepared.data.digest, "partition": prepared.split.digest}
    with Simulation(job([exact], [prepared]), Reading) as simulation:
        try:
            next(simulation.rounds())
        except FirstBatch as found:
            return digests, found
    raise AssertionError("no client read anything")


def trace(experiment: Experiment, folder: Path | None) -> dict[str, Any]:
    """Return the trace of an experiment's job, under the experiment's seed."""
    digests, found = first_batch(experiment, folder)
    batch, content = found.batch, hashlib.sha256()
    for tensor in (batch.x, batch.y):
        content.update(tensor.contiguous().numpy().tobytes())
    return {
        **digests,
        "batch": content.hexdigest(),
        "output": _output(found, "eval"),
        "trained": _output(found, "train"),
    }


def _output(found: FirstBatch, mode: Any) -> list[float]:
    """Return the network's answer to the first example, and to all examples in short."""
    model, tensors = found.model, found.sent["all"]
    params = {name: tensors[name] for name in model.param_names}
    buffers = {name: tensors[name] for name in model.buffer_names}
    with torch.no_grad():
        logits = model(params, buffers, found.batch.x, mode=mode, key=found.batch.key).logits
    return [*logits[0].tolist(), float(logits.sum()), float(logits.square().sum())]


def jobs() -> Iterator[tuple[str, list[RecordedRun]]]:
    """Yield the jobs of the committed runs, each with its runs, the lowest seed first."""
    found: dict[str, list[RecordedRun]] = {}
    for run in runs():
        found.setdefault(job_of(run), []).append(run)
    for name in sorted(found):
        yield (
            name,
            sorted(found[name], key=lambda run: (run.experiment.seed, run.experiment.digest)),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with the official data files")
    folder = parser.parse_args().data
    kept = json.loads(FILE.read_text()) if FILE.exists() else {}
    written = {}
    for name, behind in jobs():
        experiment = behind[0].experiment
        try:
            written[name] = {"digest": experiment.digest, **trace(experiment, folder)}
        except InputError as error:
            print(f"not changed: {name}: {error}")
            if name in kept:
                written[name] = kept[name]
    FILE.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
