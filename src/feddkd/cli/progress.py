"""Progress of runs on standard error: bars on a terminal, plain lines elsewhere."""

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from feddkd.cli.console import clock, console
from feddkd.engines.memory import in_words, peak_memory
from feddkd.experiment import Experiment
from feddkd.rounds.loop import Row
from feddkd.rounds.metrics import headline

log = logging.getLogger(__name__)
QUIET = 30.0  # seconds between two plain lines of a run


@dataclass
class Follower:
    """Follows a run and computes the note after each of its rounds."""

    experiment: Experiment
    last: int  # the run's last round
    sizes: Sequence[int] = ()  # how many training examples each client has
    began: float = field(default_factory=time.perf_counter)
    images: int = 0
    rounds: int = 0

    def after(self, row: Row) -> str:
        """Return the headline metric, the gain of DKD, and images per second of the run.

        Clients that bring their own examples have the size 0 here: their images are not counted.
        """
        self.images += sum(
            exchange.phase.reads.examples(self.sizes[client])
            for exchange in self.experiment.parsed_method.plan(row["round"])
            if exchange.phase.client is not None and exchange.phase.at == "clients"
            for client in row["clients"]
            if self.sizes[client]
        )
        self.rounds += 1
        metric = headline([row])
        speed = f", {self.images / self.seconds:,.0f} images/s" if self.images else ""
        if metric.test_key not in row:
            return f"not evaluated{speed}"
        value, digits = row[metric.test_key], metric.digits - 1
        gain = ""
        if metric.average_key in row:
            gain = f", DKD {metric.scale * (value - row[metric.average_key]):+.{digits}f}"
        shown = f"{metric.scale * value:.{digits}f}{metric.unit}"
        return f"test {shown}{gain}{speed}"

    def left(self, row: Row) -> str:
        """Return how long the remaining rounds will take."""
        return clock(self.seconds / self.rounds * (self.last - row["round"]))

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began


def title(experiment: Experiment) -> str:
    """Return the name of a run on the screen."""
    label = experiment.name or " | ".join(call.name for call in experiment.parsed_method.calls)
    return f"{label}, seed {experiment.seed}"


class Bars:
    """A bar for each run and one for all runs. Without a terminal: a line every half minute, and
    one at the end of a run.
    """

    def __init__(
        self, experiments: Sequence[Experiment], device: torch.device, until: int | None = None
    ) -> None:
        self._device, self._quiet = device, not sys.stderr.isatty()
        name, note = (
            TextColumn(f"{{task.{part}}}", markup=False) for part in ("description", "fields[note]")
        )
        columns = name, BarColumn(), MofNCompleteColumn(), note, TimeRemainingColumn()
        self._progress = Progress(*columns, console=console(stderr=True), disable=self._quiet)
        self._runs = [Follower(experiment, experiment.length(until)) for experiment in experiments]
        self._titles = [title(experiment) for experiment in experiments]
        self._tasks: dict[int, TaskID] = {}
        self._shown_at: dict[int, float] = {}  # time of a run's last plain line
        total = sum(run.last for run in self._runs)
        self._whole = self._progress.add_task(
            "all runs", total=total, note="", visible=len(experiments) > 1
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def begin(self, at: int, sizes: Sequence[int]) -> None:
        """Show a run that plays its first round."""
        self._runs[at].sizes, self._runs[at].began = sizes, time.perf_counter()
        self._tasks[at] = self._progress.add_task(
            self._titles[at], total=self._runs[at].last, note=""
        )
        self._shown_at[at] = time.perf_counter()

    def row(self, at: int, row: Row) -> None:
        """Show a round that is over. An error in this is logged: a display ends no run."""
        try:
            self._show(at, row)
        except Exception as error:
            log.warning("cannot show round %s: %r", row.get("round"), error)

    def _show(self, at: int, row: Row) -> None:
        note, task = self._runs[at].after(row), self._tasks[at]
        before = self._progress.tasks[task].completed
        self._progress.update(task, completed=row["round"], note=note)
        self._progress.update(
            self._whole, advance=row["round"] - before, note=_memory(self._device)
        )
        if self._quiet:
            self._line(at, row, note)

    def _line(self, at: int, row: Row, note: str) -> None:
        run, name = self._runs[at], self._titles[at]
        if row["round"] == run.last:
            print(f"{name}: round {row['round']}, {note.partition(',')[0]}", file=sys.stderr)
        elif time.perf_counter() - self._shown_at[at] > QUIET:
            self._shown_at[at] = time.perf_counter()
            where = f"round {row['round']} of {run.last}"
            print(
                f"{name}: {where}, {note}, {_memory(self._device)}, {run.left(row)} left",
                file=sys.stderr,
            )


def _memory(device: torch.device) -> str:
    peak = peak_memory(device)
    return "" if peak is None else f"{in_words(peak)} of memory"
