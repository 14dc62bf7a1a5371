"""Some runs on their way together: play the rounds, write the record, keep checkpoints, go on from them."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from feddkd.runs import checkpoint
from feddkd.runs.checkpoint import Snapshot, Writer
from feddkd.engines.interface import Engine
from feddkd.engines.select import find_device
from feddkd.rounds.evaluation import confusions
from feddkd.experiment import Experiment
from feddkd.runs.signals import Enough, Halt, Halted
from feddkd.runs.prepare import Prepared
from feddkd.runs.recorder import Recorder, describe
from feddkd.rounds.loop import Row, Run
from feddkd.simulation import DTYPES, Result, simulate_runs
from feddkd.runs.summary import summarise

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Every:
    """When to write a checkpoint: after so many rounds, or once so many minutes have passed since the last."""

    rounds: int | None = None
    minutes: float = 1.0

    def due(self, round: int, seconds: float) -> bool:
        return seconds >= 60 * self.minutes if self.rounds is None else round % self.rounds == 0


OFTEN = Every()


class Group(NamedTuple):
    members: list[int]
    snapshots: list[Snapshot]  # all of the same round; none: from the beginning


def abreast(folders: Sequence[Path], digests: Sequence[str], device: torch.device, fresh: bool) -> list[Group]:
    """Runs that can go on side by side, since they stand after the same round: if possible all of them."""
    members = range(len(folders))
    if fresh or not folders:
        return [Group(list(members), [])] if folders else []
    held = [_good(folder, digest, device) for folder, digest in zip(folders, digests, strict=True)]
    common = set.intersection(*map(set, held))
    stands = [max(common or own, default=0) for own in held]
    return [
        Group([n for n in members if stands[n] == t], [held[n][t] for n in members if stands[n] == t] if t else [])
        for t in sorted(set(stands))
    ]


def _good(folder: Path, digest: str, device: torch.device) -> dict[int, Snapshot]:
    """A run's checkpoints by round. A damaged one is passed over with a line that says so: the one before is as good."""
    found = {}
    for round in checkpoint.rounds(folder):
        try:
            found[round] = checkpoint.read(folder, digest, round, device)
        except checkpoint.DamagedError as error:
            log.warning("%s; it is left aside", error)
    return found


@dataclass
class Session:
    """Some experiments on their way together."""

    experiments: Sequence[Experiment]
    folders: Sequence[Path]
    prepared: Sequence[Prepared]
    snapshots: Sequence[Snapshot]
    every: Every
    until: int | None = None  # stop after this round, to go on another time

    def run(
        self,
        engine: str,
        device: str,
        options: Mapping[str, Any] | None,
        on_row: Callable[[int, Row], None],
    ) -> list[dict[str, Any]]:
        first = self.experiments[0]
        prepared = self.prepared
        self.recorders, self.writer = [Recorder(folder) for folder in self.folders], Writer()
        try:
            with Halt() as halt:
                runs, facts = simulate_runs(
                    prepared[0].model, first.parsed_method, [ready.federation for ready in prepared],
                    [ready.model.start() for ready in prepared],
                    [experiment.seed for experiment in self.experiments],
                    rounds=first.rounds, cohort=first.cohort, protocol=first.protocol, engine=engine, device=device,
                    dtype=DTYPES[first.dtype], options=options, diagnostics=first.diagnostics, delta=first.delta,
                    resume=self.snapshots, tolerance=first.tolerance,
                    on_start=lambda: self._open(prepared, engine, find_device(device)),
                    on_round=lambda rows, snapshots: self._after(rows, snapshots, halt, on_row),
                    on_end=lambda engine, runs: self._count(prepared, engine, runs),
                )  # fmt: skip
            self.writer.wait()
            return [self._finish(run, facts) for run in runs]
        except Enough:
            return [self._stand(at) for at in range(len(self.experiments))]
        finally:
            self.writer.close()
            for recorder in self.recorders:
                recorder.close()

    def _open(self, prepared: Sequence[Prepared], engine: str, device: torch.device) -> None:
        self.histories: list[list[Row]] = []
        for recorder in self.recorders:
            recorder.take()
        for experiment, ready, recorder in zip(self.experiments, prepared, self.recorders, strict=True):
            manifest = _manifest(experiment, ready, engine, device)
            if self.snapshots:
                self.histories.append(recorder.go_on(manifest, self.snapshots[0].round))
            else:
                recorder.begin(manifest)
                self.histories.append([])
            recorder.keep("partition.json", {"classes": ready.data.labels, "counts": ready.federation.held.tolist()})
        self.last = self.saved = time.perf_counter()

    def _after(
        self, rows: dict[int, Row], snapshots: Callable[[], dict[int, Snapshot]], halt: Halt, on_row: Callable[[int, Row], None]
    ) -> None:
        """A round has ended: write it down, keep a checkpoint if one is due, stop if somebody asked for it."""
        now = time.perf_counter()
        for index, row in rows.items():
            self.histories[index].append(row)
            self.recorders[index].row(row, (now - self.last) / len(rows))
            on_row(index, row)
        self.last = now
        t = row["round"]
        more = t < self.experiments[0].rounds
        enough = self.until is not None and t >= self.until
        if more and (halt.asked or enough or self.every.due(t, now - self.saved)):
            self.writer.submit(partial(self._save, snapshots()))
            self.saved = now
        if more and (halt.asked or enough):
            self.writer.wait()
            message = f"stopped after round {t}; the same command goes on from there"
            raise Halted(message, halt.asked) if halt.asked else Enough

    def _count(self, prepared: Sequence[Prepared], engine: Engine, runs: Sequence[Run]) -> None:
        """The final models' confusion matrices."""
        states = [(run.index, run.state) for run in runs]
        found = confusions(engine, states, self.experiments[0].protocol, prepared[0].data.classes)
        for run, counts in zip(runs, found, strict=True):
            labels = prepared[run.index].data.labels
            self.recorders[run.index].keep("confusion.json", {"classes": labels, "counts": counts})

    def _save(self, snapshots: Mapping[int, Snapshot]) -> None:
        for index, snapshot in snapshots.items():
            self.recorders[index].sync()
            checkpoint.write(self.folders[index], self.experiments[index].digest, snapshot)

    def _finish(self, run: Run, facts: dict[str, Any]) -> dict[str, Any]:
        """A run's summary. Of one that could not go on there is no more than why."""
        experiment, recorder, history = self.experiments[run.index], self.recorders[run.index], self.histories[run.index]
        if run.error is not None:
            recorder.end(str(run.error))
            return {**self._stand(run.index), "ended": str(run.error)}
        result = Result({**run.state["params"], **run.state["buffers"]}, history, self.prepared[run.index].model)
        result.save(recorder.folder / "final.safetensors")
        summary = {**self._stand(run.index), **summarise(history, experiment.target), "seconds": round(recorder.seconds, 3)}
        recorder.finish(summary, facts)
        return summary

    def _stand(self, index: int) -> dict[str, Any]:
        """Which run it is, and how far it has come."""
        experiment, rounds = self.experiments[index], len(self.histories[index])
        return {"digest": experiment.digest, "method": experiment.method, "seed": experiment.seed, "rounds": rounds}


def _manifest(experiment: Experiment, ready: Prepared, engine: str, device: torch.device) -> dict[str, Any]:
    return describe(
        experiment,
        engine=engine,
        device=device,
        data={"name": ready.data.name, "digest": ready.data.digest, "note": ready.data.note},
        partition={"digest": ready.split.digest, "sizes": ready.federation.sizes},
        parameters=sum(tensor.numel() for name, tensor in ready.model.net.named_parameters() if tensor.requires_grad),
        **({"constants": ready.model.constants_digest} if ready.model.constants else {}),
    )
