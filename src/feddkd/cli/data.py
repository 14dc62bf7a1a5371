"""feddkd data: look at data sources and at how they are divided among clients."""

import json
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from feddkd.cli.console import (
    AsJson,
    DataDir,
    File,
    Settings,
    command_group,
    console,
    page,
    summary,
)
from feddkd.data.partitions.changes import descriptions
from feddkd.data.partitions.registry import PARTITIONS
from feddkd.data.sources import SOURCES
from feddkd.data.sources.downloads import download
from feddkd.data.sources.packed import pack, used
from feddkd.data.sources.python_source import find_source
from feddkd.errors import InputError
from feddkd.experiment import load
from feddkd.reports.client_table import drawing
from feddkd.reports.heterogeneity import heterogeneity
from feddkd.runs.prepare import prepare
from feddkd.trees import first_tensor

data_app = command_group("Look at data sources and at how they are divided among clients.")


def _sources() -> list[str]:
    """Return the sources that need no option, unlike `npz`, which needs a path."""
    return [name for name in SOURCES if ... not in SOURCES.options(name).values()]


@data_app.command("list")
def data_list(as_json: AsJson = False) -> None:
    """List the data sources, with their files and where to get them, and the partitions."""
    plain = {name: SOURCES[name]() for name in _sources()}
    sources: list[dict[str, Any]] = [
        {
            "name": name,
            "summary": source.summary,
            "files": list(source.files),
            "origin": source.origin,
        }
        for name, source in plain.items()
    ]
    sources += [
        {"name": name, "summary": summary(SOURCES, name), "files": [], "origin": ""}
        for name in SOURCES
        if name not in plain
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
        typer.Argument(help="Sources, with options if they need any; all sources by default."),
    ] = None,
    data: DataDir = None,
) -> None:
    """Read all of some data sources and print counts, shapes and digest.

    The exit status is 2 if one cannot be read. A source FILE.py:function runs the file.
    """
    bad = []
    for name, source in {name: find_source(name) for name in names or _sources()}.items():
        try:
            read = source.load(data)
            shape = "x".join(map(str, first_tensor(read.train.x).shape[1:]))
            note = f"; {read.note}" if read.note else ""
            size = f"{len(read.train):,} training and {len(read.test):,} test examples of {shape}"
            print(f"{name}: {size}, {read.classes} classes, sha256 {read.digest[:12]}{note}")
        except InputError as error:
            bad.append(name)
            print(f"{name}: {error}")
    if bad:
        raise InputError(f"these sources cannot be read: {', '.join(bad)}")


@data_app.command("get")
def data_get(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Data sources.")],
    data: DataDir = None,
    mirror: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A folder with the files, asked first; repeatable."),
    ] = None,
) -> None:
    """Download the official files of data sources into the data folder, and check their md5.

    Without a network it says which files to get by hand, and where they go.
    """
    if data is None:
        raise InputError("say where the files go: --data DIR, or FEDDKD_DATA")
    for name in names:
        for line in download(name, data, mirror or ()):
            print(f"{name}: {line}")


@data_app.command("show")
def data_show(
    file: File,
    set_: Settings = None,
    data: DataDir = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="Write the partition to a file.")
    ] = None,
) -> None:
    """Draw how the data of the first experiment of a file is divided: clients x classes.

    `partition = "saved(path='FILE.npz')"` uses a partition that --save has written.
    """
    experiment = load(file, set_ or ())[0]
    prepared = prepare(experiment, data)
    if save is not None:
        try:
            prepared.split.save(save)
        except OSError as error:
            raise InputError(f"cannot write the partition to {save}: {error.strerror}") from None
    screen = console()
    federation = prepared.federation
    names, held = federation.held_by(prepared.data.class_names)
    print(f"{experiment.partition} of {experiment.data}, partition {prepared.split.digest[:12]}")
    print(_measures(held.tolist()))
    for part, lists in (("test", federation.own_test), ("validation", federation.own_validation)):
        if lists is not None:
            sizes = [len(one) for one in lists]
            print(f"{min(sizes)} to {max(sizes)} {part} examples of each client's own")
    changes = descriptions(
        experiment.parsed_partition.changes,
        experiment.clients,
        experiment.split_key,
        first_tensor(prepared.data.train.x).shape,
    )
    screen.print(drawing(held, names, screen.width, changes))


def _measures(held: list[list[int]]) -> str:
    """Return the sizes of the clients and how much they differ, in one line."""
    sizes = [sum(row) for row in held]
    facts = [
        f"{len(sizes)} clients, {sum(sizes):,} training examples",
        f"{min(sizes)} to {max(sizes)} each, median {median(sizes):g}",
    ]
    measures = heterogeneity(held) if any(sizes) else {}
    if len(held[0]) == 1:  # there are no classes
        measures = {}
    return "; ".join([*facts, *(f"{name} {value:.3g}" for name, value in measures.items())])


@data_app.command("pack")
def data_pack(
    files: Annotated[list[Path], typer.Argument(metavar="FILE.toml...", help="The experiments.")],
    out: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Where the copy is written; `--data DIR` then reads it."),
    ],
    data: DataDir = None,
) -> None:
    """Write a compact copy of the data that experiments read, for machines without the original
    files, in pieces below 60 MiB.

    Runs on the copy have the same numbers: it keeps all labels, the images that are read, and the
    digest of the original.
    """
    experiments = [experiment for file in files for experiment in load(file)]
    for source in {experiment.parsed_data: None for experiment in experiments}:
        ready = [
            prepare(experiment, data)
            for experiment in experiments
            if experiment.parsed_data == source
        ]
        whole = ready[0].data
        train, test = used(whole, [part for one in ready for part in one.federation.parts])
        written = pack(whole, source, train, test, out)
        size = sum(path.stat().st_size for path in written) / 2**20
        counts = (
            f"{len(train):,} of {len(whole.train):,} training and {len(test):,} of"
            f" {len(whole.test):,} test images"
        )
        print(f"{whole.name}: {counts}, {size:.1f} MiB in {len(written) - 1} pieces")
