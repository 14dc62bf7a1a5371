"""Runs on their way, on standard error: bars on a terminal, plain lines elsewhere."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from feddkd.cli.console import clock, console
from feddkd.engines.batched.memory import in_words, peak_memory
from feddkd.experiment import Experiment
from feddkd.rounds.loop import Row
from feddkd.runs.record import folder_name

QUIET = 30.0  # seconds: no more than one plain line of a run in so many


@dataclass
class Follower:
    """What to say of a run after each of its rounds."""

    experiment: Experiment
    place: Path
    last: int  # round that it is to reach
    began: float = field(default_factory=time.perf_counter)
    images: int = 0
    rounds: int = 0

    @cached_property
    def sizes(self) -> list[int]:
        """n_k, from the record, which has begun by the time it is needed."""
        manifest = self.place / folder_name(self.experiment) / "manifest.json"
        sizes: list[int] = json.loads(manifest.read_text(encoding="utf-8"))["partition"]["sizes"]
        return sizes

    def after(self, row: Row) -> str:
        """Accuracy, what DKD added, images a second since the run was begun or went on."""
        self.images += sum(
            exchange.phase.reads.examples(self.sizes[client])
            for exchange in self.experiment.parsed_method.plan(row["round"])
            if exchange.phase.client is not None and exchange.phase.at == "clients"
            for client in row["clients"]
        )
        self.rounds += 1
        gain = (
            f", DKD {100 * (row['test_accuracy'] - row['average_test_accuracy']):+.1f}" if "average_test_accuracy" in row else ""
        )
        return f"test {100 * row['test_accuracy']:.1f} %{gain}, {self.images / self.seconds:,.0f} images/s"

    def left(self, row: Row) -> str:
        return clock(self.seconds / self.rounds * (self.last - row["round"]))

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began


def title(experiment: Experiment) -> str:
    label = experiment.name or " | ".join(call.name for call in experiment.parsed_method.calls)
    return f"{label}, seed {experiment.seed}"


@contextmanager
def bars(
    experiments: Sequence[Experiment], places: Sequence[Path], device: torch.device, until: int | None = None
) -> Iterator[Callable[[int], Callable[[Row], None]]]:
    """A bar for each run and one for all; where standard error is no terminal, a line now and then and one at a run's end."""
    quiet = not sys.stderr.isatty()
    name, note = (TextColumn(f"{{task.{part}}}", markup=False) for part in ("description", "fields[note]"))
    columns = name, BarColumn(), MofNCompleteColumn(), note, TimeRemainingColumn()
    with Progress(*columns, console=console(stderr=True), disable=quiet) as progress:
        sweep = len(experiments) > 1
        whole = progress.add_task("all runs", total=sum(e.length(until) for e in experiments), note="", visible=sweep)

        def follow(at: int) -> Callable[[Row], None]:
            run, named = Follower(experiments[at], places[at], experiments[at].length(until)), title(experiments[at])
            task = progress.add_task(named, total=run.last, note="")
            last = time.perf_counter()

            def on_row(row: Row) -> None:
                nonlocal last
                note, before = run.after(row), progress.tasks[task].completed
                progress.update(task, completed=row["round"], note=note)
                progress.update(whole, advance=row["round"] - before, note=_memory(device))
                if quiet and row["round"] == run.last:
                    print(f"{named}: round {row['round']}, {note.partition(',')[0]}", file=sys.stderr)
                elif quiet and time.perf_counter() - last > QUIET:
                    last = time.perf_counter()
                    where = f"round {row['round']} of {run.last}"
                    print(f"{named}: {where}, {note}, {_memory(device)}, {run.left(row)} left", file=sys.stderr)

            return on_row

        yield follow


def _memory(device: torch.device) -> str:
    peak = peak_memory(device)
    return "" if peak is None else f"{in_words(peak)} of memory"
