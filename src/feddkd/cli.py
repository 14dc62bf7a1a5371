"""The command line: feddkd run | methods | data | report | bench."""

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

from feddkd.bench import JOBS, Bench, document, page, setting, sized
from feddkd.data.partition import PARTITIONS
from feddkd.data.sources import SOURCES
from feddkd.errors import ClientError, InputError, NobodyAnsweredError
from feddkd.execute import execute, lock_step
from feddkd.experiment import Experiment, load
from feddkd.figure import curves
from feddkd.halt import Halted
from feddkd.methods import METHODS
from feddkd.prepare import prepare
from feddkd.record import find, folder_name
from feddkd.report import drawing, table
from feddkd.rounds import Row
from feddkd.spelling import Registry
from feddkd.version import __version__

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
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


def _console(stderr: bool = False) -> Console:
    """Shows texts as they are: what is in brackets or between colons is the user's, not markup."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def _fail(message: str, status: int = 2) -> None:
    if message:  # there is none where help was asked for by saying nothing
        print("feddkd: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(status)


@app.command()
def run(
    file: File,
    set_: Settings = None,
    engine: Annotated[str, typer.Option(help="Where clients compute: auto, batched, pool, serial.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    precision: Annotated[str | None, typer.Option(help="Of the batched engine: fp32, tf32, bf16.")] = None,
    strategy: Annotated[str | None, typer.Option(help="Of the batched engine: auto, vmap, graph, fused, ...")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; 1 is quickest for small networks.")] = None,
    data: DataDir = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where run folders are written.")] = Path("runs"),
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
    """
    experiments = load(file, set_ or ())
    if threads is not None:
        torch.set_num_threads(threads)
    options = {key: value for key, value in (("precision", precision), ("strategy", strategy)) if value is not None}
    done: dict[int, dict[str, Any]] = {}
    with _bars(experiments, quiet=not sys.stderr.isatty()) as follow:
        for group in lock_step(experiments):
            bars = [follow(at) for at in group]
            summaries = execute(
                [experiments[at] for at in group], out=out, folder=data, engine=engine, device=device, options=options,
                on_row=lambda at, row, bars=bars: bars[at](row),  # type: ignore[misc]
            )  # fmt: skip
            done |= dict(zip(group, summaries, strict=True))
    console = _console(stderr=as_json)
    console.print(table([find(out / folder_name(e))[0] for e in experiments]))
    console.print(f"written to {out}{os.sep}", soft_wrap=True)
    if as_json:
        wanted = ("digest", "method", "seed", "rounds", "test_accuracy", "best_round", "final_test_accuracy", "communications",
                  "local_steps", "bytes_up", "bytes_down", "seconds", "selection", "to_target")  # fmt: skip
        print(json.dumps({"runs": [{key: done[at][key] for key in wanted} for at in range(len(experiments))]}))


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
def methods(as_json: AsJson = False) -> None:
    """List the methods, what each does and its options with their defaults. Compose them with |, as in fedavg() | dkd()."""
    if as_json:
        rows = [{"name": name, "summary": _summary(METHODS, name), "options": METHODS.options(name)} for name in METHODS]
        print(json.dumps({"methods": rows}, default=lambda _: None))  # an option without a default has `...`: null
        return
    page = _page("method", "what it does", "options")
    for name in METHODS:
        options = (key if value is ... else f"{key}={value!r}" for key, value in METHODS.options(name).items())
        page.add_row(name, _summary(METHODS, name), ", ".join(options))
    _console().print(page)


def _page(*headings: str) -> Table:
    page = Table(show_lines=True)
    for heading in headings:
        page.add_column(heading, overflow="fold")
    return page


def _summary(registry: Registry[Any], name: str) -> str:
    return (registry[name].__doc__ or "").strip().splitlines()[0]


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


@app.command()
def bench(
    job: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Which job; repeatable; all of them if none.")] = None,
    engine: Annotated[str | None, typer.Option(help="The engine to measure; the fastest kind unless said.")] = None,
    strategy: Annotated[str | None, typer.Option(help="One of the engine's strategies, where it has several.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; a GPU where there is one.")] = None,
    precision: Annotated[str | None, typer.Option(help="tf32, fp32, bf16 or fp64.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads, of the plain loop too.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps an exchange where steps are timed (J for dkd).")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repeats; the median counts.")] = 5,
    small: Annotated[bool, typer.Option("--small", help="Everything tiny: a smoke test, no measurement.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the JSON object to a file, too.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure an engine against the plain loop over clients, in the same run, on made-up data.

    Jobs: femnist, vgg9, many-small, mlp, dirichlet, seeds, dkd; bench/README.md says what each is.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    here = setting(engine=engine, device=device, precision=precision, strategy=strategy, repeats=repeats)
    runner = Bench(here, sized(device=here.device, small=small, steps=steps))
    entries: list[dict[str, Any]] = []
    for one in [runner.find(name) for name in job or JOBS]:
        if out is not None and not entries:
            _write_json(out, document(entries, here, small=small))  # complain before anything is measured
        _console(stderr=True).print(f"{one.name}: {one.what}")
        entries.append(runner.measure(one))
        if out is not None:  # after every job: a run that is stopped keeps what it had
            _write_json(out, document(entries, here, small=small))
    _console(stderr=as_json).print(page(entries, here))
    if as_json:
        print(json.dumps(document(entries, here, small=small), default=str))


def _write_json(path: Path, value: Any) -> None:
    try:
        path.write_text(json.dumps(value, indent=1, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def _sources() -> list[str]:
    """Those that can be had without saying more: `npz` needs a path."""
    return [name for name in SOURCES if ... not in SOURCES.options(name).values()]


@data_app.command("list")
def data_list(as_json: AsJson = False) -> None:
    """The data sources, which files each reads and where to get them; and the partitions."""
    made = {name: SOURCES[name]() for name in _sources()}
    sources: list[dict[str, Any]] = [
        {"name": name, "summary": source.summary, "files": list(source.files), "origin": source.origin}
        for name, source in made.items()
    ]
    sources += [
        {"name": name, "summary": _summary(SOURCES, name), "files": [], "origin": ""} for name in SOURCES if name not in made
    ]
    partitions = [{"name": name, "summary": _summary(PARTITIONS, name)} for name in PARTITIONS]
    if as_json:
        print(json.dumps({"sources": sources, "partitions": partitions}))
        return
    page, rules = _page("source", "what it is, which files it reads, where to get them"), _page("partition", "what it does")
    for source in sources:
        facts = source["summary"], ", ".join(source["files"]), source["origin"]
        page.add_row(source["name"], "\n".join(filter(None, facts)))
    for rule in partitions:
        rules.add_row(rule["name"], rule["summary"])
    _console().print(page, rules)


@data_app.command("check")
def data_check(
    names: Annotated[list[str] | None, typer.Argument(help="Sources, with options if need be; all of them if none.")] = None,
    data: DataDir = None,
) -> None:
    """Read data sources whole and say what was found: counts, shapes, hash. Exit status 2 if one cannot be read."""
    bad = []
    for name, source in {name: SOURCES.one(name) for name in names or _sources()}.items():
        try:
            found = source.load(data)
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
    """Draw how the data of an experiment, the first of the file, is divided: clients x classes.

    A partition kept by --save is used by `partition = "saved(path='FILE.npz')"`.
    """
    experiment = load(file, set_ or ())[0]
    prepared = prepare(experiment, data)
    if save is not None:
        try:
            prepared.split.save(save)
        except OSError as error:
            raise InputError(f"cannot write the partition to {save}: {error.strerror}") from None
    y = prepared.federation.y.numpy()
    held = np.stack([np.bincount(y[indices], minlength=prepared.data.classes) for indices in prepared.federation.train])
    console = _console()
    page = drawing(held, prepared.data.labels, console.width)
    page.title = f"{experiment.partition} of {experiment.data}, partition {prepared.split.digest[:12]}"
    console.print(page)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if show:
        print(f"feddkd {__version__}")
        raise typer.Exit


if __name__ == "__main__":
    main()
