"""Options and output that the commands share."""

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from feddkd.errors import InputError

if TYPE_CHECKING:
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


def command_group(help: str) -> typer.Typer:
    """Return an empty group of commands, such as `feddkd data`."""
    return typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        help=help,
    )


def console(stderr: bool = False) -> Console:
    """Return a console that prints texts unchanged, without reading markup in them."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def skipped(errors: Sequence[InputError]) -> None:
    """Name the runs that cannot be read, and end the command with status 1 if there are any."""
    print_skipped(errors)
    if errors:
        raise typer.Exit(1)


def print_skipped(errors: Sequence[InputError]) -> None:
    """Print a line for each run that cannot be read."""
    for error in errors:
        print(f"feddkd: skipped: {error}", file=sys.stderr)


def page(*headings: str) -> Table:
    """Return a table with lines between its rows."""
    table = Table(show_lines=True)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def plain_table(*headings: str, left: Collection[int] = (0,), title: str | None = None) -> Table:
    """Return a table without lines; the columns at the positions `left` hold texts, the others
    numbers.
    """
    table = Table(title=title, box=SIMPLE_HEAD, padding=0, show_edge=False)
    for at, heading in enumerate(headings):
        table.add_column(heading, overflow="fold", justify="left" if at in left else "right")
    return table


def summary(registry: "Registry[Any]", name: str) -> str:
    """Return the first paragraph of what a registered function says about itself."""
    return " ".join((registry[name].__doc__ or "").split("\n\n")[0].split())


def clock(seconds: float) -> str:
    """Return a duration in seconds, minutes, hours, days or years."""
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 72:
        return f"{hours} h {minutes} min" if hours else f"{minutes} min"
    days = hours / 24
    return f"{days:.0f} days" if days < 730 else f"{days / 365.25:.3g} years"
