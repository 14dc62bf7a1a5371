"""feddkd data: look at data sources and at how they are divided among clients."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from feddkd.cli.console import AsJson, DataDir, File, Settings, console, page, summary
from feddkd.data.partitions.registry import PARTITIONS
from feddkd.data.sources.official import SOURCES
from feddkd.data.sources.packed import pack, used
from feddkd.data.sources.python_source import find_source
from feddkd.errors import InputError
from feddkd.experiment import load
from feddkd.reports.tables import drawing
from feddkd.runs.prepare import prepare

data_app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Look at data sources and at how they are divided among clients.",
)


def _sources() -> list[str]:
    """Those that can be had without saying more: `npz` needs a path."""
    return [name for name in SOURCES if ... not in SOURCES.options(name).values()]


@data_app.command("list")
def data_list(as_json: AsJson = False) -> None:
    """The data sources, which files each reads and where to get them; and the partitions."""
    made = {name: SOURCES[name]() for name in _sources()}
    sources: list[dict[str, Any]] = [
        {
            "name": name,
            "summary": source.summary,
            "files": list(source.files),
            "origin": source.origin,
        }
        for name, source in made.items()
    ]
    sources += [
        {"name": name, "summary": summary(SOURCES, name), "files": [], "origin": ""}
        for name in SOURCES
        if name not in made
    ]
    partitions = [{"name": name, "summary": summary(PARTITIONS, name)} for name in PARTITIONS]
    if as_json:
        print(json.dumps({"sources": sources, "partitions": partitions}))
        return
    sources_page, rules = (
        page("source", "what it is, which files it reads, where to get them"),
        page("partition", "what it does"),
    )
    for source in sources:
        facts = source["summary"], ", ".join(source["files"]), source["origin"]
        sources_page.add_row(source["name"], "\n".join(filter(None, facts)))
    for rule in partitions:
        rules.add_row(rule["name"], rule["summary"])
    console().print(sources_page, rules)


@data_app.command("check")
def data_check(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Sources, with options if need be; all of them if none."),
    ] = None,
    data: DataDir = None,
) -> None:
    """Read data sources whole and say what was found: counts, shapes, hash. Exit status 2 if one
    cannot be read.
    """
    bad = []
    for name, source in {name: find_source(name) for name in names or _sources()}.items():
        try:
            found = source.load(data)
            shape, note = (
                "x".join(map(str, found.train.x.shape[1:])),
                f"; {found.note}" if found.note else "",
            )
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
    save: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="Keep the partition in a file.")
    ] = None,
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
    screen = console()
    picture = drawing(prepared.federation.held, prepared.data.labels, screen.width)
    picture.title = (
        f"{experiment.partition} of {experiment.data}, partition {prepared.split.digest[:12]}"
    )
    screen.print(picture)


@data_app.command("pack")
def data_pack(
    files: Annotated[list[Path], typer.Argument(metavar="FILE.toml...", help="The experiments.")],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the copy is written; `--data DIR` reads it.")
    ],
    data: DataDir = None,
) -> None:
    """Write a compact copy of what experiments read, in pieces below 60 MiB, for machines without
    the original files.

    Runs on the copy are the same runs: it keeps all labels, the images that are read, and the
    digest of the original.
    """
    experiments = [experiment for file in files for experiment in load(file)]
    for source in {experiment.parsed_data: None for experiment in experiments}:
        ready = [
            prepare(experiment, data)
            for experiment in experiments
            if experiment.parsed_data == source
        ]
        found = ready[0].data
        train, test = used(found, [part for one in ready for part in one.federation.parts])
        written = pack(found, source, train, test, out)
        size = sum(path.stat().st_size for path in written) / 2**20
        counts = (
            f"{len(train):,} of {len(found.train):,} training and {len(test):,} of"
            f" {len(found.test):,} test images"
        )
        print(f"{found.name}: {counts}, {size:.1f} MiB in {len(written) - 1} pieces")
