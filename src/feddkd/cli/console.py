"""What the commands share: options, and how things are shown."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from feddkd.spec.registry import Registry

DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data", metavar="DIR", envvar="FEDDKD_DATA", help="Folder with the official data files."
    ),
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="End with one JSON object on the last line of standard output."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the file; repeatable."),
]
File = Annotated[Path, typer.Argument(metavar="FILE.toml", help="The experiment.")]


def console(stderr: bool = False) -> Console:
    """Shows texts as they are: what is in brackets or between colons is the user's, not markup."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def page(*headings: str) -> Table:
    table = Table(show_lines=True)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def summary(registry: Registry[Any], name: str) -> str:
    return " ".join((registry[name].__doc__ or "").split("\n\n")[0].split())


def clock(seconds: float) -> str:
    """As people say it."""
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
