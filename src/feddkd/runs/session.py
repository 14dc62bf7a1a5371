"""Runs in lock-step with their folders: play the rounds, write the records and checkpoints."""

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import save

from feddkd.engines.interface import EngineFactory
from feddkd.engines.select import find_device
from feddkd.experiment import Experiment
from feddkd.method import own_tensors
from feddkd.models.weight_files import weights_in_bytes
from feddkd.rounds.loop import Row, Run
from feddkd.runs import checkpoint
from feddkd.runs.checkpoint import Writer
from feddkd.runs.circumstances import circumstances
from feddkd.runs.description import RunDescription
from feddkd.runs.lock import BusyError
from feddkd.runs.prepare import Prepared
from feddkd.runs.record import finished_summary
from feddkd.runs.recorder import PRIVATE, Recorder
from feddkd.runs.signals import Enough, Halt, Halted
from feddkd.runs.summary import summarise
from feddkd.simulation import DTYPES, Job, Simulation, Snapshot, Start


@dataclass(frozen=True)
class Every:
    """When to write a checkpoint: after every `rounds` rounds if given, else after `minutes`."""

    rounds: int | None = None
    minutes: float = 1.0

    def due(self, round: int, seconds: float) -> bool:
        """Return whether to write one after a round, `seconds` after the last checkpoint."""
        return seconds >= 60 * self.minutes if self.rounds is None else round % self.rounds == 0


OFTEN = Every()


class RunBegun(NamedTuple):
    """A run has a folder and is about to play its first round."""

    at: int  # its position among the runs
    sizes: Sequence[int]  # how many training examples each client has


class RoundPlayed(NamedTuple):
    """A round is over and is in the record."""

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

    job: Job
    descriptions: Sequence[RunDescription]
    folders: Sequence[Path]
    snapshots: Sequence[Snapshot] = ()
    every: Every = OFTEN
    until: int | None = None  # stop after this round, to continue another time
    replaces: bool = False  # whether finished runs in the folders are run again
    keep_private: bool = False  # whether the record keeps the tensors that clients keep
    histories: list[list[Row]] = field(default_factory=list)
    stopped: str | None = None  # why the runs end before their last round
    # while `play()` goes on
    simulation: Simulation = field(init=False)
    around: dict[str, Any] = field(init=False)  # the circumstances
    recorders: list[Recorder] = field(init=False)
    writer: Writer = field(init=False)
    last: float = field(init=False)  # time at the end of the last round
    saved: float = field(init=False)  # time of the last checkpoint

    def play(
        self, engine: str | EngineFactory, device: str, options: Mapping[str, Any] | None = None
    ) -> Generator[Event]:
        """Play the rounds that remain and yield events; `at` is the position in `descriptions`.

        If `stopped` is set while a round's events are handled, the runs end after that round.
        """
        self.recorders, self.writer = [Recorder(folder) for folder in self.folders], Writer()
        begin = partial(Simulation, self.job, engine, device, options, self.snapshots)
        try:
            with Halt() as halt, begin() as simulation:
                self.simulation = simulation
                rounds = simulation.rounds()  # raises an error before anything is written
                name, place = simulation.facts["name"], find_device(device)
                self.around = circumstances(name, place, self.job.dtype, options)
                yield from self._open()
                for rows in rounds:
                    yield from self._record(rows)
                    if self.stopped is not None:
                        break
                    self._save_if_due(simulation, halt)
                self._keep_confusions(simulation)
                self.writer.wait()
                for run in simulation.runs:
                    yield RunEnded(run.index, self._finish(run, simulation))
        except Enough:
            for at in range(len(self.descriptions)):
                yield RunEnded(at, self._progress_of(at))
        finally:
            self.writer.close()
            for recorder in self.recorders:
                recorder.close()

    def _open(self) -> Iterator[RunBegun]:
        """Make or reopen all folders, then yield an event for each run."""
        for recorder in self.recorders:
            recorder.take()
        for folder, run in zip(self.folders, self.descriptions, strict=True):
            if not self.replaces and finished_summary(folder, run.digest) is not None:
                raise BusyError(f"another process has finished {folder} meanwhile")
        for at, recorder in enumerate(self.recorders):
            description, federation = self.descriptions[at], self.job.starts[at].federation
            manifest = {**description.manifest, **self.around}
            if self.snapshots:
                self.histories.append(recorder.go_on(manifest, self.snapshots[0].round))
            else:
                recorder.begin(manifest)
                self.histories.append([])
            names, held = federation.held_by(description.labels)
            recorder.keep("partition.json", {"classes": names, "counts": held.tolist()})
        self.last = self.saved = time.perf_counter()
        for at, start in enumerate(self.job.starts):
            yield RunBegun(at, start.federation.sizes)

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
            message = f"stopped after round {t}: the same command continues the run"
            raise Halted(message, halt.asked) if halt.asked else Enough

    def _keep_confusions(self, simulation: Simulation) -> None:
        """Write the confusion matrices of the final models."""
        for index, counts in simulation.confusions().items():
            labels = self.descriptions[index].labels
            self.recorders[index].keep("confusion.json", {"classes": labels, "counts": counts})

    def _save(self, snapshots: Mapping[int, Snapshot]) -> None:
        for index, snapshot in snapshots.items():
            self.recorders[index].sync()
            checkpoint.write(self.folders[index], self.descriptions[index].digest, snapshot)

    def _finish(self, run: Run, simulation: Simulation) -> dict[str, Any]:
        """Finish the record of a run and return its summary. For a run that could not go on this is
        only how far it came, and why it ended.
        """
        recorder, history = self.recorders[run.index], self.histories[run.index]
        if run.error is not None:
            recorder.end(str(run.error))
            return {**self._progress_of(run.index), "ended": str(run.error)}
        self._save_model(run)
        if self.keep_private:
            self._save_private(run, simulation)
        numbers = summarise(history, self.descriptions[run.index].target)
        summary = {**self._progress_of(run.index), **numbers, "seconds": round(recorder.seconds, 3)}
        stopped = {} if self.stopped is None else {"stopped": self.stopped}
        recorder.finish(summary, {**self.around["engine"], **simulation.facts}, **stopped)
        return summary

    def _save_model(self, run: Run) -> None:
        """Write the final global model."""
        tensors = {**run.state["params"], **run.state["buffers"]}
        content = weights_in_bytes(self.job.model, tensors)
        self.recorders[run.index].put("final.safetensors", content)

    def _save_private(self, run: Run, simulation: Simulation) -> None:
        """Write the tensors that clients keep, under names such as `3/head.weight`."""
        tensors = {}
        for client, memo in simulation.engine.memos_of(run.index).items():
            for name, tensor in own_tensors(memo).items():
                tensors[f"{client}/{name}"] = tensor.cpu().contiguous()
        if tensors:
            self.recorders[run.index].put(PRIVATE, save(tensors))

    def _progress_of(self, index: int) -> dict[str, Any]:
        """Return which run it is, and how many rounds it has played."""
        run, rounds = self.descriptions[index], len(self.histories[index])
        return {"digest": run.digest, "method": run.method, "seed": run.seed, "rounds": rounds}


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
        evaluation=first.judging,
        tolerance=first.tolerance,
        selection=first.parsed_selection,
        attack=first.parsed_attack,
        diagnostics=first.diagnostics,
        delta=first.delta,
    )
