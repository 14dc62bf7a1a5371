"""How commands run experiments: their options, progress on standard error, and what is shown at the end."""

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from feddkd.commands.terminal import console
from feddkd.errors import RunError
from feddkd.execute import execute, in_precision, lock_step
from feddkd.experiment import Experiment
from feddkd.record import find, folder_name
from feddkd.report import table
from feddkd.rounds import Row
from feddkd.session import Every

Engine = Annotated[str, typer.Option(help="Where clients compute: auto, batched, pool, serial.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
Precision = Annotated[str | None, typer.Option(help="fp64 (as dtype = float64), fp32; on a GPU also tf32, bf16.")]
Strategy = Annotated[str | None, typer.Option(help="Of the batched engine: auto, vmap, graph, fused, ...")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; 1 is quickest for small networks.")]
EveryRounds = Annotated[int | None, typer.Option(min=1, metavar="N", help="Checkpoint after every N rounds, not by the clock.")]
EveryMinutes = Annotated[float, typer.Option(min=0, metavar="N", help="Checkpoint once so many minutes have passed.")]
OnDivergence = Annotated[
    str | None, typer.Option(metavar="drop|stop|continue", help="For clients whose numbers are not finite; as --set.")
]


def run_all(
    experiments: list[Experiment], places: list[Path], *, engine: str, device: str, precision: str | None, strategy: str | None,
    threads: int | None, data: Path | None, every_rounds: int | None, every_minutes: float, as_json: bool, fresh: bool = False,
    until: int | None = None,
) -> None:  # fmt: skip
    """Run experiments as a command's options say, each in a folder under its place, and show what came out."""
    experiments, options = in_precision(experiments, precision, engine, device)
    options |= {"strategy": strategy} if strategy is not None else {}
    every = Every(every_rounds, every_minutes)
    if threads is not None:
        torch.set_num_threads(threads)
    done: dict[int, dict[str, Any]] = {}
    with _bars(experiments, quiet=not sys.stderr.isatty()) as follow, _telling(logging.WARNING if as_json else logging.INFO):
        for group in lock_step(experiments, places):
            bars = [follow(at) for at in group]
            summaries = execute(
                [experiments[at] for at in group], out=places[group[0]], folder=data, engine=engine, device=device,
                options=options, every=every, fresh=fresh, until=until, on_row=lambda at, row, bars=bars: bars[at](row),  # type: ignore[misc]
            )  # fmt: skip
            done |= dict(zip(group, summaries, strict=True))
    folders = [place / folder_name(experiment) for experiment, place in zip(experiments, places, strict=True)]
    if records := [record for folder in folders for record in find(folder, begun=True) if record.history]:
        console(stderr=as_json).print(table(records))
    if as_json:
        wanted = ("digest", "method", "seed", "rounds", "test_accuracy", "best_round", "final_test_accuracy", "communications",
                  "local_steps", "bytes_up", "bytes_down", "seconds", "selection", "to_target", "ended")  # fmt: skip
        print(json.dumps({"runs": [{key: done[at].get(key) for key in wanted} for at in range(len(experiments))]}))
    if ended := [f"{_title(experiments[at])}: {done[at]['ended']}" for at in sorted(done) if "ended" in done[at]]:
        raise RunError(f"{len(ended)} of {len(experiments)} runs could not go on: {'; '.join(ended)}")


class _Lines(logging.Handler):
    """What the library logs, a line each on standard error; above the progress bars, where there are any."""

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), file=sys.stderr)


@contextmanager
def _telling(level: int) -> Iterator[None]:
    library, lines = logging.getLogger("feddkd"), _Lines(level)
    before = library.level
    library.addHandler(lines)
    library.setLevel(level)
    try:
        yield
    finally:
        library.removeHandler(lines)
        library.setLevel(before)


@contextmanager
def _bars(experiments: list[Experiment], quiet: bool) -> Iterator[Callable[[int], Callable[[Row], None]]]:
    """A progress bar for each run on standard error; where that is not a terminal, a plain line a run at its end."""
    title, note = (TextColumn(f"{{task.{part}}}", markup=False) for part in ("description", "fields[note]"))
    columns = title, BarColumn(), MofNCompleteColumn(), note, TimeRemainingColumn()
    with Progress(*columns, console=console(stderr=True), disable=quiet) as progress:

        def follow(index: int) -> Callable[[Row], None]:
            experiment = experiments[index]
            task = progress.add_task(_title(experiment), total=experiment.rounds, note="")

            def on_row(row: Row) -> None:
                note = f"test {100 * row['test_accuracy']:.1f} %"
                progress.update(task, completed=row["round"], note=note)
                if quiet and row["round"] == experiment.rounds:
                    print(f"{_title(experiment)}: round {row['round']}, {note}", file=sys.stderr)

            return on_row

        yield follow


def _title(experiment: Experiment) -> str:
    label = experiment.name or " | ".join(call.name for call in experiment.parsed_method.calls)
    return f"{label}, seed {experiment.seed}"
