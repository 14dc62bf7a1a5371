"""How commands run experiments: their options, progress on standard error, and what is shown at the end."""

import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from feddkd.cli.console import console
from feddkd.cli.dry_run import LONG, plan, planned
from feddkd.cli.progress import bars, title
from feddkd.engines.select import find_device
from feddkd.errors import RunError
from feddkd.experiment import Experiment
from feddkd.reports.tables import table
from feddkd.rounds.loop import Row
from feddkd.runs.loggers import check_loggers, logging_to
from feddkd.runs.record import find, folder_name
from feddkd.runs.runner import execute, in_precision, lock_step
from feddkd.runs.session import Every

Engine = Annotated[str, typer.Option(help="Where clients compute: auto, batched, pool, serial; flower-sim: on a Ray cluster.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
Precision = Annotated[str | None, typer.Option(help="fp64 (as dtype = float64), fp32; on a GPU also tf32, bf16.")]
Strategy = Annotated[str | None, typer.Option(help="Of the batched engine: auto, vmap, graph, fused, ...")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; 1 is quickest for small networks.")]
Log = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Log rounds, too: csv, tensorboard, mlflow, wandb; repeatable.")
]
EveryRounds = Annotated[int | None, typer.Option(min=1, metavar="N", help="Checkpoint after every N rounds, not by the clock.")]
EveryMinutes = Annotated[float, typer.Option(min=0, metavar="N", help="Checkpoint once so many minutes have passed.")]
OnDivergence = Annotated[
    str | None, typer.Option(metavar="drop|stop|continue", help="For clients whose numbers are not finite; as --set.")
]

OnRow = Callable[[int, Row], None]


def run_all(
    experiments: list[Experiment], places: list[Path], *, engine: str, device: str, precision: str | None, strategy: str | None,
    threads: int | None, data: Path | None, every_rounds: int | None, every_minutes: float, as_json: bool, fresh: bool = False,
    dry: bool = False, log: Sequence[str] | None = None, until: int | None = None,
) -> None:  # fmt: skip
    """Run experiments as a command's options say, each in a folder under its place, and show what came out.

    `dry` only says what that would take. Before a long sweep it is said, too; not on a GPU, where to compile for a trial may
    itself take minutes.
    """
    if engine == "flower-sim":
        from feddkd.cli.flower import run_on_ray

        return run_on_ray(experiments, places, data, Every(every_rounds, every_minutes), fresh, as_json)
    experiments, options = in_precision(experiments, precision, engine, device)
    options |= {"strategy": strategy} if strategy is not None else {}
    every = Every(every_rounds, every_minutes)
    if threads is not None:
        torch.set_num_threads(threads)
    if dry or (device == "cpu" and sum(experiment.length(until) for experiment in experiments) >= LONG):
        told = plan(experiments, places, fresh=fresh, until=until, folder=data, engine=engine, device=device, options=options)
        console(stderr=as_json or not dry).print(planned(told))
        if dry:
            if as_json:
                print(json.dumps(told))
            return

    def do(group: list[int], on_row: OnRow) -> list[dict[str, Any]]:
        return execute(
            [experiments[at] for at in group], out=places[group[0]], folder=data, engine=engine, device=device,
            options=options, every=every, fresh=fresh, until=until, on_row=on_row,
        )  # fmt: skip

    watch_all(experiments, places, lock_step(experiments, places), do, as_json, device, log or (), until)


def watch_all(
    experiments: list[Experiment], places: list[Path], groups: list[list[int]],
    do: Callable[[list[int], OnRow], list[dict[str, Any]]], as_json: bool, device: str = "cpu", log: Sequence[str] = (),
    until: int | None = None,
) -> None:  # fmt: skip
    """Do one group of experiments after another, show how far they are, and at the end what came out."""
    check_loggers(log)
    done: dict[int, dict[str, Any]] = {}
    level = logging.WARNING if as_json else logging.INFO
    with bars(experiments, places, find_device(device), until) as follow, _telling(level):
        for group in groups:
            with ExitStack() as open_ones:
                tell = [_both(follow(at), logging_to(log, experiments[at], places[at], open_ones)) for at in group]
                summaries = do(group, lambda at, row, tell=tell: tell[at](row))  # type: ignore[misc]
            done |= dict(zip(group, summaries, strict=True))
    folders = [place / folder_name(experiment) for experiment, place in zip(experiments, places, strict=True)]
    if records := [record for folder in folders for record in find(folder, begun=True) if record.history]:
        console(stderr=as_json).print(table(records))
    if as_json:
        wanted = ("digest", "method", "seed", "rounds", "test_accuracy", "best_round", "final_test_accuracy", "communications",
                  "local_steps", "bytes_up", "bytes_down", "epsilon", "delta", "seconds", "selection", "to_target",
                  "ended")  # fmt: skip
        print(json.dumps({"runs": [{key: done[at].get(key) for key in wanted} for at in range(len(experiments))]}))
    if ended := [f"{title(experiments[at])}: {done[at]['ended']}" for at in sorted(done) if "ended" in done[at]]:
        raise RunError(f"{len(ended)} of {len(experiments)} runs could not go on: {'; '.join(ended)}")


def _both(one: Callable[[Row], None], other: Callable[[Row], None]) -> Callable[[Row], None]:
    def on_row(row: Row) -> None:
        one(row)
        other(row)

    return on_row


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
