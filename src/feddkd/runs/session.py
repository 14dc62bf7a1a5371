"""Some runs on their way together:

play the rounds, write the record, keep checkpoints, go on from them.
"""

import logging
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from feddkd.engines.interface import EngineFactory
from feddkd.engines.select import engine_name, find_device
from feddkd.experiment import Experiment
from feddkd.models.weight_files import write_weights
from feddkd.rounds.loop import Row, Run
from feddkd.runs import checkpoint
from feddkd.runs.checkpoint import Writer
from feddkd.runs.prepare import Prepared
from feddkd.runs.recorder import Recorder, describe
from feddkd.runs.signals import Enough, Halt, Halted
from feddkd.runs.summary import summarise
from feddkd.simulation import DTYPES, Job, Simulation, Snapshot, Start

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Every:
    """When to write a checkpoint: after so many rounds, or once so many minutes have passed since
    the last.
    """

    rounds: int | None = None
    minutes: float = 1.0

    def due(self, round: int, seconds: float) -> bool:
        return seconds >= 60 * self.minutes if self.rounds is None else round % self.rounds == 0


OFTEN = Every()


class Group(NamedTuple):
    members: list[int]
    snapshots: list[Snapshot]  # all of the same round; none: from the beginning


def abreast(
    folders: Sequence[Path], digests: Sequence[str], device: torch.device, fresh: bool
) -> list[Group]:
    """Runs that can go on side by side, since they stand after the same round: if possible all of
    them.
    """
    members = range(len(folders))
    if fresh or not folders:
        return [Group(list(members), [])] if folders else []
    held = [_good(folder, digest, device) for folder, digest in zip(folders, digests, strict=True)]
    common = set.intersection(*map(set, held))
    stands = [max(common or own, default=0) for own in held]
    return [
        Group(
            [n for n in members if stands[n] == t],
            [held[n][t] for n in members if stands[n] == t] if t else [],
        )
        for t in sorted(set(stands))
    ]


def _good(folder: Path, digest: str, device: torch.device) -> dict[int, Snapshot]:
    """A run's checkpoints by round.

    A damaged one is passed over with a line that says so: the one before is as good.
    """
    found = {}
    for round in checkpoint.rounds(folder):
        try:
            found[round] = checkpoint.read(folder, digest, round, device)
        except checkpoint.DamagedError as error:
            log.warning("%s; it is left aside", error)
    return found


class RunBegun(NamedTuple):
    """A run has a folder and is about to play its first round."""

    at: int  # its place among the experiments
    sizes: Sequence[int]  # how many training examples each client has


class RoundPlayed(NamedTuple):
    """A round is over and stands in the record."""

    at: int
    row: Row


class RunEnded(NamedTuple):
    """A run has played its last round, was finished before, or could not go on."""

    at: int
    summary: dict[str, Any]


Event = RunBegun | RoundPlayed | RunEnded


@dataclass
class Session:
    """Runs in lock-step with their folders.

    `play()` is the loop: it records every round and yields what happens.
    """

    experiments: Sequence[Experiment]
    folders: Sequence[Path]
    prepared: Sequence[Prepared]
    snapshots: Sequence[Snapshot]
    every: Every
    until: int | None = None  # stop after this round, to go on another time
    histories: list[list[Row]] = field(default_factory=list)

    def play(
        self, engine: str | EngineFactory, device: str, options: Mapping[str, Any] | None
    ) -> Generator[Event]:
        """Play the rounds that remain and yield events; `at` is the place in `experiments`."""
        self.recorders, self.writer = [Recorder(folder) for folder in self.folders], Writer()
        try:
            with (
                Halt() as halt,
                Simulation(self.job(), engine, device, options, self.snapshots) as simulation,
            ):
                rounds = simulation.rounds()  # complains now, before anything is written
                yield from self._open(engine_name(engine), find_device(device))
                for rows in rounds:
                    yield from self._record(rows)
                    self._save_if_due(simulation, halt)
                self._keep_confusions(simulation)
                self.writer.wait()
                for run in simulation.runs:
                    yield RunEnded(run.index, self._finish(run, simulation.facts))
        except Enough:
            for at in range(len(self.experiments)):
                yield RunEnded(at, self._stand(at))
        finally:
            self.writer.close()
            for recorder in self.recorders:
                recorder.close()

    def job(self) -> Job:
        """Return what the experiments describe: they differ in their seeds alone."""
        return job(self.experiments, self.prepared)

    def _open(self, engine: str, device: torch.device) -> Iterator[RunBegun]:
        """Make or reopen all folders, then yield an event for each run."""
        for recorder in self.recorders:
            recorder.take()
        for experiment, ready, recorder in zip(
            self.experiments, self.prepared, self.recorders, strict=True
        ):
            manifest = _manifest(experiment, ready, engine, device)
            if self.snapshots:
                self.histories.append(recorder.go_on(manifest, self.snapshots[0].round))
            else:
                recorder.begin(manifest)
                self.histories.append([])
            recorder.keep(
                "partition.json",
                {"classes": ready.data.labels, "counts": ready.federation.held.tolist()},
            )
        self.last = self.saved = time.perf_counter()
        for at, ready in enumerate(self.prepared):
            yield RunBegun(at, ready.federation.sizes)

    def _record(self, rows: Mapping[int, Row]) -> Iterator[RoundPlayed]:
        """Write the rows of a round, and yield an event for each."""
        now = time.perf_counter()
        for index, row in rows.items():
            self.histories[index].append(row)
            self.recorders[index].row(row, (now - self.last) / len(rows))
        self.last = now
        for index, row in rows.items():
            yield RoundPlayed(index, row)

    def _save_if_due(self, simulation: Simulation, halt: Halt) -> None:
        """Write a checkpoint if one is due; raise Halted or Enough if the runs are to stop here."""
        t = simulation.round
        if t >= simulation.job.rounds:
            return
        enough = self.until is not None and t >= self.until
        if halt.asked or enough or self.every.due(t, self.last - self.saved):
            self.writer.submit(partial(self._save, simulation.snapshots()))
            self.saved = self.last
        if halt.asked or enough:
            self.writer.wait()
            message = f"stopped after round {t}; the same command goes on from there"
            raise Halted(message, halt.asked) if halt.asked else Enough

    def _keep_confusions(self, simulation: Simulation) -> None:
        """Write the confusion matrices of the final models."""
        for index, counts in simulation.confusions().items():
            labels = self.prepared[index].data.labels
            self.recorders[index].keep("confusion.json", {"classes": labels, "counts": counts})

    def _save(self, snapshots: Mapping[int, Snapshot]) -> None:
        for index, snapshot in snapshots.items():
            self.recorders[index].sync()
            checkpoint.write(self.folders[index], self.experiments[index].digest, snapshot)

    def _finish(self, run: Run, facts: dict[str, Any]) -> dict[str, Any]:
        """A run's summary. Of one that could not go on there is no more than why."""
        experiment, recorder, history = (
            self.experiments[run.index],
            self.recorders[run.index],
            self.histories[run.index],
        )
        if run.error is not None:
            recorder.end(str(run.error))
            return {**self._stand(run.index), "ended": str(run.error)}
        self._save_model(run)
        summary = {
            **self._stand(run.index),
            **summarise(history, experiment.target),
            "seconds": round(recorder.seconds, 3),
        }
        recorder.finish(summary, facts)
        return summary

    def _save_model(self, run: Run) -> None:
        """Write the final global model."""
        tensors = {**run.state["params"], **run.state["buffers"]}
        write_weights(
            self.prepared[run.index].model, tensors, self.folders[run.index] / "final.safetensors"
        )

    def _stand(self, index: int) -> dict[str, Any]:
        """Which run it is, and how far it has come."""
        experiment, rounds = self.experiments[index], len(self.histories[index])
        return {
            "digest": experiment.digest,
            "method": experiment.method,
            "seed": experiment.seed,
            "rounds": rounds,
        }


def _manifest(
    experiment: Experiment, ready: Prepared, engine: str, device: torch.device
) -> dict[str, Any]:
    return describe(
        experiment,
        engine=engine,
        device=device,
        data={"name": ready.data.name, "digest": ready.data.digest, "note": ready.data.note},
        partition={"digest": ready.split.digest, "sizes": ready.federation.sizes},
        parameters=sum(
            tensor.numel()
            for name, tensor in ready.model.net.named_parameters()
            if tensor.requires_grad
        ),
        **({"constants": ready.model.constants_digest} if ready.model.constants else {}),
    )


def job(experiments: Sequence[Experiment], prepared: Sequence[Prepared]) -> Job:
    """Return the job of experiments that differ in their seeds alone."""
    first = experiments[0]
    starts = [
        Start(experiment.seed, ready.federation, *ready.model.start())
        for experiment, ready in zip(experiments, prepared, strict=True)
    ]
    return Job(
        prepared[0].model,
        first.parsed_method,
        starts,
        dtype=DTYPES[first.dtype],
        rounds=first.rounds,
        cohort=first.cohort,
        protocol=first.protocol,
        tolerance=first.tolerance,
        diagnostics=first.diagnostics,
        delta=first.delta,
    )
