"""A progress bar for runs that are started from Python."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Self

from feddkd.rounds.loop import Row
from feddkd.rounds.metrics import headline


class RoundBars:
    """A bar for each run on standard error, as (title, number of rounds).

    With `shown=None` the bars are shown if standard error is a terminal.
    """

    def __init__(self, runs: Sequence[tuple[str, int]], shown: bool | None = None) -> None:
        self._runs = runs
        self._shown = sys.stderr.isatty() if shown is None else shown
        self._stack = ExitStack()
        self._tasks: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if self._shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
            from rich.progress import TimeRemainingColumn as TimeLeft

            name = TextColumn("{task.description}", markup=False)
            note = TextColumn("{task.fields[note]}", markup=False)
            columns = name, BarColumn(), MofNCompleteColumn(), note, TimeLeft()
            console = Console(stderr=True)
            self._bars = self._stack.enter_context(Progress(*columns, console=console))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def row(self, at: int, row: Row) -> None:
        """Show a round that run number `at` has played."""
        if not self._shown:
            return
        title, rounds = self._runs[at]
        if at not in self._tasks:
            self._tasks[at] = self._bars.add_task(title, total=rounds, note="")
        metric = headline([row])
        note = "not evaluated"
        if metric.test_key in row:
            value = metric.scale * row[metric.test_key]
            note = f"test {value:.{metric.digits - 1}f}{metric.unit}"
        self._bars.update(self._tasks[at], completed=row["round"], note=note)
