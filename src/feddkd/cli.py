"""The command line: feddkd run | methods | data | report | bench."""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from feddkd.commands.bench import bench
from feddkd.commands.data import data_app
from feddkd.commands.methods import methods
from feddkd.commands.terminal import AsJson, DataDir, File, Settings
from feddkd.commands.terminal import console as _console
from feddkd.errors import ClientError, InputError, NobodyAnsweredError
from feddkd.execute import execute, in_precision, lock_step
from feddkd.experiment import Experiment, load
from feddkd.figure import curves
from feddkd.halt import Halted
from feddkd.record import find, folder_name
from feddkd.report import table
from feddkd.rounds import Row
from feddkd.session import Every
from feddkd.version import __version__

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Federated learning by decentralised knowledge distillation.\n\n"
    "Write an experiment as a TOML file, `feddkd run` it, `feddkd report` what came out.",
)
app.add_typer(data_app, name="data")


Engine = Annotated[str, typer.Option(help="Where clients compute: auto, batched, pool, serial.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
Precision = Annotated[str | None, typer.Option(help="fp64 (as dtype = float64), fp32; on a GPU also tf32, bf16.")]
Strategy = Annotated[str | None, typer.Option(help="Of the batched engine: auto, vmap, graph, fused, ...")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; 1 is quickest for small networks.")]
EveryRounds = Annotated[int | None, typer.Option(min=1, metavar="N", help="Checkpoint after every N rounds, not by the clock.")]
EveryMinutes = Annotated[float, typer.Option(min=0, metavar="N", help="Checkpoint once so many minutes have passed.")]


def main() -> None:
    """Entry point: a user's mistake is one line on standard error and exit status 2, never a traceback."""
    try:
        sys.exit(app(standalone_mode=False))
    except InputError as error:
        _fail(str(error))
    except (ClientError, NobodyAnsweredError) as error:
        _fail(str(error), status=1)
    except Halted as halted:
        _fail(str(halted), status=halted.status)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", status=130)
    except OSError as error:  # a full disk, a closed pipe
        _fail(str(error), status=1)
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer's usage errors have it, and no public class of their own
            raise
        _fail(error.format_message())


def _fail(message: str, status: int = 2) -> None:
    if message:  # there is none where help was asked for by saying nothing
        print("feddkd: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(status)


@app.command()
def run(
    file: File,
    set_: Settings = None,
    engine: Engine = "auto",
    device: Device = "cpu",
    precision: Precision = None,
    strategy: Strategy = None,
    threads: Threads = None,
    data: DataDir = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where run folders are written.")] = Path("runs"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Run again what is finished or was cut short.")] = False,
    every_rounds: EveryRounds = None,
    every_minutes: EveryMinutes = 1.0,
    as_json: AsJson = False,
) -> None:
    """Run the experiments of a file: one run for each combination of its [sweep].

    A file needs one key, `method`, as in

        method = "fedavg(epochs=5, lr=0.1) | dkd(steps=10, lr=0.2)"

    The others have defaults:

    - data = "digits", partition = "dirichlet(alpha=0.1)": see `feddkd data list`
    - model = "mlp(hidden='64')", or femnist_cnn, vgg9, digit_cnn, emnist_cnn, small_cnn
    - clients = 10; cohort = 1.0, the share of them active in a round, or their number; rounds = 10
    - seed = 0 decides everything random; split_seed, if given, validation set and partition in its place
    - validation = 0.1, training = all the rest: shares of the training set, class by class; public = 0: a share of the
      clients' part that the server holds for everybody to see, for methods that use such data
    - transform: in place of the one that goes with the data, as in "pad(pixels=2) | normalise(mean=0.5, std=0.5)"
    - evaluation = "auto", or global, client_mean, client_pooled; dtype = "float32", or float64
    - diagnostics = true logs the theory's quantities (L1', L2', their bound, update norms, clients' losses) in every round
    - target: a test accuracy whose price is reported; name: a label for tables

    A table [sweep] lists values, as in seed = [0, 1, 2]. Change any key by --set rounds=5, --set 'method=fedavg(lr=0.3)',
    --set 'sweep.seed=[0, 1]'.

    Runs that are finished in DIR are left alone, and those that were cut short go on to the same numbers. Ctrl-C ends the round
    and saves; the second one stops at once.
    """
    experiments, options = in_precision(load(file, set_ or ()), precision, engine, device)
    options |= {"strategy": strategy} if strategy is not None else {}
    how = {"folder": data, "engine": engine, "device": device, "options": options, "every": Every(every_rounds, every_minutes)}
    _run(experiments, [out] * len(experiments), threads, as_json, fresh=fresh, **how)
    if not as_json:
        _console().print(f"written to {out}{os.sep}", soft_wrap=True)


@app.command()
def resume(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of runs, or folders that hold such.")],
    engine: Engine = "auto",
    device: Device = "cpu",
    precision: Precision = None,
    strategy: Strategy = None,
    threads: Threads = None,
    data: DataDir = None,
    every_rounds: EveryRounds = None,
    every_minutes: EveryMinutes = 1.0,
    as_json: AsJson = False,
) -> None:
    """Go on with the runs under some folders that were cut short, each from its last checkpoint."""
    found = [record for folder in folders for record in find(folder, begun=True)]
    places = [record.folder.parent for record in found]
    experiments, options = in_precision([record.experiment for record in found], precision, engine, device)
    options |= {"strategy": strategy} if strategy is not None else {}
    how = {"folder": data, "engine": engine, "device": device, "options": options, "every": Every(every_rounds, every_minutes)}
    _run(experiments, places, threads, as_json, **how)


def _run(experiments: list[Experiment], places: list[Path], threads: int | None, as_json: bool, **how: Any) -> None:
    """Run experiments, each in a folder under its place, and show what came out."""
    if threads is not None:
        torch.set_num_threads(threads)
    done: dict[int, dict[str, Any]] = {}
    with _bars(experiments, quiet=not sys.stderr.isatty()) as follow, _telling(logging.WARNING if as_json else logging.INFO):
        for group in lock_step(experiments, places):
            bars = [follow(at) for at in group]
            summaries = execute(
                [experiments[at] for at in group], out=places[group[0]], **how,
                on_row=lambda at, row, bars=bars: bars[at](row),  # type: ignore[misc]
            )  # fmt: skip
            done |= dict(zip(group, summaries, strict=True))
    console = _console(stderr=as_json)
    console.print(table([find(place / folder_name(e))[0] for e, place in zip(experiments, places, strict=True)]))
    if as_json:
        wanted = ("digest", "method", "seed", "rounds", "test_accuracy", "best_round", "final_test_accuracy", "communications",
                  "local_steps", "bytes_up", "bytes_down", "seconds", "selection", "to_target")  # fmt: skip
        print(json.dumps({"runs": [{key: done[at][key] for key in wanted} for at in range(len(experiments))]}))


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
    with Progress(*columns, console=_console(stderr=True), disable=quiet) as progress:

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


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of runs.")] = Path("runs"),
    figure: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the accuracy curves, too: .png, .svg, .pdf.")] = None,
) -> None:
    """A table of all runs under a folder: mean and standard deviation over seeds, and what a target accuracy cost."""
    records = find(folder)
    _console().print(table(records))
    if figure is not None:
        curves(records, figure)


app.command()(methods)
app.command()(bench)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if show:
        print(f"feddkd {__version__}")
        raise typer.Exit


if __name__ == "__main__":
    main()
