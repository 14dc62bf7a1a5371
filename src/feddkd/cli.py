"""The command line: feddkd run | methods | data | report."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from feddkd.data.partition import PARTITIONS
from feddkd.data.sources import SOURCES
from feddkd.errors import ClientError, InputError, NobodyAnsweredError
from feddkd.execute import execute, prepare
from feddkd.experiment import Experiment, load
from feddkd.methods import METHODS
from feddkd.record import find, folder_name
from feddkd.report import table
from feddkd.rounds import Row
from feddkd.spelling import Registry
from feddkd.version import __version__

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Federated learning by decentralised knowledge distillation.\n\n"
    "Write an experiment as a TOML file, `feddkd run` it, `feddkd report` what came out.",
)
data_app = typer.Typer(no_args_is_help=True, help="Look at data sources and at how they are divided among clients.")
app.add_typer(data_app, name="data")

DataDir = Annotated[
    Path | None, typer.Option("--data", metavar="DIR", envvar="FEDDKD_DATA", help="Folder with the official data files.")
]
AsJson = Annotated[bool, typer.Option("--json", help="End with one JSON object on the last line of standard output.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the file; repeatable.")]
File = Annotated[Path, typer.Argument(metavar="FILE.toml", help="The experiment.")]


def main() -> None:
    """Entry point: a user's mistake is one line on standard error and exit status 2, never a traceback."""
    try:
        sys.exit(app(standalone_mode=False))
    except InputError as error:
        _fail(str(error))
    except (ClientError, NobodyAnsweredError) as error:
        _fail(str(error), status=1)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", status=130)
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer's usage errors have it, and no public class of their own
            raise
        _fail(error.format_message())


def _fail(message: str, status: int = 2) -> None:
    print("feddkd: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(status)


@app.command()
def run(
    file: File,
    set_: Settings = None,
    engine: Annotated[str, typer.Option(help="Where clients compute: serial.")] = "serial",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; 1 is quickest for small networks.")] = None,
    data: DataDir = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where run folders are written.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Run the experiments of a file: one run for each combination of its [sweep].

    A file needs one key, `method`, as in

        method = "fedavg(epochs=5, lr=0.1) | dkd(steps=10, lr=0.2)"

    The others are data, partition, model, clients, cohort, rounds, seed, split_seed, validation, training, transform, evaluation,
    dtype, target and name. A table [sweep] lists values, as in seed = [0, 1, 2]. Change any of them with --set, e.g.
    --set rounds=5 --set 'partition=dirichlet(alpha=0.5)' --set 'sweep.seed=[0, 1]'.
    """
    experiments = load(file, set_ or ())
    if threads is not None:
        torch.set_num_threads(threads)
    with _bars(experiments, quiet=not sys.stderr.isatty()) as follow:
        summaries = [
            execute(e, out=out, folder=data, engine=engine, device=device, on_row=follow(index))
            for index, e in enumerate(experiments)
        ]
    Console(stderr=as_json).print(table([find(out / folder_name(e))[0] for e in experiments]))
    Console(stderr=as_json).print(f"written to {out}{os.sep}", highlight=False)
    if as_json:
        wanted = ("digest", "method", "seed", "rounds", "test_accuracy", "best_round", "final_test_accuracy", "communications",
                  "local_steps", "bytes_up", "bytes_down", "seconds", "selection", "to_target")  # fmt: skip
        print(json.dumps({"runs": [{key: summary[key] for key in wanted} for summary in summaries]}))


@contextmanager
def _bars(experiments: list[Experiment], quiet: bool) -> Iterator[Callable[[int], Callable[[Row], None]]]:
    """A progress bar for each run on standard error; where that is not a terminal, a plain line a run at its end."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}")
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=quiet) as progress:

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
def methods(as_json: AsJson = False) -> None:
    """List the methods, what each does and its options with their defaults. Compose them with |, as in fedavg() | dkd()."""
    if as_json:
        rows = [{"name": name, "summary": _summary(METHODS, name), "options": METHODS.options(name)} for name in METHODS]
        print(json.dumps({"methods": rows}))
        return
    page = _page("method", "what it does", "options")
    for name in METHODS:
        options = ", ".join(f"{key}={value!r}" for key, value in METHODS.options(name).items())
        page.add_row(name, _summary(METHODS, name), options)
    Console().print(page)


def _page(*headings: str) -> Table:
    page = Table(show_lines=True)
    for heading in headings:
        page.add_column(heading, overflow="fold")
    return page


def _summary(registry: Registry[Any], name: str) -> str:
    return (registry[name].__doc__ or "").strip().splitlines()[0]


@app.command()
def report(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of runs.")] = Path("runs")) -> None:
    """A table of all runs under a folder: mean and standard deviation over seeds, and what a target accuracy cost."""
    Console().print(table(find(folder)))


def _sources() -> list[str]:
    """Those that can be had without saying more: `npz` needs a path."""
    return [name for name in SOURCES if ... not in SOURCES.options(name).values()]


@data_app.command("list")
def data_list(as_json: AsJson = False) -> None:
    """The data sources, which files each reads and where to get them; and the partitions."""
    sources = {name: SOURCES[name]() for name in _sources()}
    partitions = {name: _summary(PARTITIONS, name) for name in PARTITIONS}
    if as_json:
        rows = [{"name": n, "summary": s.summary, "files": list(s.files), "origin": s.origin} for n, s in sources.items()]
        print(json.dumps({"sources": rows, "partitions": [{"name": n, "summary": s} for n, s in partitions.items()]}))
        return
    page = _page("source", "what it is", "files", "where to get them")
    for name, source in sources.items():
        page.add_row(name, source.summary, "\n".join(source.files) or "none needed", source.origin)
    rules = _page("partition", "what it does")
    for name, summary in partitions.items():
        rules.add_row(name, summary)
    Console().print(page, rules)


@data_app.command("check")
def data_check(
    names: Annotated[list[str] | None, typer.Argument(help="Sources, with options if need be; all of them if none.")] = None,
    data: DataDir = None,
) -> None:
    """Read data sources whole and say what was found: counts, shapes, hash. Exit status 2 if one cannot be read."""
    bad = []
    for name in names or _sources():
        try:
            found = SOURCES.one(name).load(data)
            shape, note = "x".join(map(str, found.train.x.shape[1:])), f"; {found.note}" if found.note else ""
            size = f"{len(found.train):,} training and {len(found.test):,} test examples of {shape}"
            print(f"{name}: {size}, {found.classes} classes, sha256 {found.digest[:12]}{note}")
        except InputError as error:
            bad.append(name)
            print(f"{name}: {error}")
    if bad:
        raise InputError(f"cannot be read here: {', '.join(bad)}")


@data_app.command("show")
def data_show(
    file: File,
    set_: Settings = None,
    data: DataDir = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE.npz", help="Keep the partition in a file.")] = None,
) -> None:
    """Draw how an experiment's data is divided: clients x classes. A partition kept by --save is used by

    partition = "saved(path='FILE.npz')".
    """
    experiment = load(file, set_ or ())[0]
    prepared = prepare(experiment, data)
    if save is not None:
        prepared.split.save(save)
    labels = prepared.federation.y.numpy()
    page = Table(title=f"{experiment.partition} of {experiment.data}, partition {prepared.split.digest[:12]}")
    for heading in ("client", "examples", *prepared.data.labels):
        page.add_column(heading, justify="right")
    for client, indices in enumerate(prepared.federation.train):
        held = np.bincount(labels[indices], minlength=prepared.data.classes)
        page.add_row(str(client), str(len(indices)), *(str(count) if count else "·" for count in held))
    Console().print(page)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if show:
        print(f"feddkd {__version__}")
        raise typer.Exit


if __name__ == "__main__":
    main()
