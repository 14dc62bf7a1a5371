"""feddkd methods: every method with its paper, formula, options, and what travels and stays."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from feddkd.cli.console import AsJson, console, page
from feddkd.errors import InputError
from feddkd.method_docs.markdown import default, facts, kept, pages, travels
from feddkd.method_docs.metadata import Entry, entries, entry


def methods(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Show these methods whole.")
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write a Markdown page for each method there."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods: what each does, its paper, its options with their defaults, what it sends
    and keeps.

    Compose them with |, as in fedavg() | dkd().
    """
    found = [entry(name) for name in names] if names else entries()
    if markdown is not None:
        _write(markdown, pages(one for one in found if one.own or names))
    elif as_json:
        # no default is `...`: null
        print(json.dumps({"methods": [_json(one) for one in found]}, default=lambda _: None))
    elif names:
        for one in found:
            _show(one)
    else:
        _list(found)


def _json(one: Entry) -> dict[str, Any]:
    return {
        "name": one.name,
        "summary": one.summary,
        "paper": None if one.paper is None else asdict(one.paper),
        "options": {setting.name: setting.default for setting in one.settings},
        "behind": one.piece,
        "sends": one.sends,
        "uploads": one.uploads,
        "keeps": one.keeps,
        "phases": [asdict(turn) for turn in one.turns],
        "text": one.text,
    }


def _list(found: list[Entry]) -> None:
    table = page("method", "what it does; paper; options; sent / uploaded / kept by the client")
    for one in found:
        own = [str(setting) for setting in one.settings if not setting.shared]
        shared = dict.fromkeys(
            f"options of {setting.shared}" for setting in one.settings if setting.shared
        )
        lines = one.summary, str(one.paper or ""), ", ".join([*own, *shared]), travels(one)
        table.add_row(one.name, "\n".join(filter(None, lines)))
    table.caption, table.caption_justify = "\n".join(_shared(found)), "left"
    console().print(table)


def _shared(found: list[Entry]) -> list[str]:
    shared: dict[str, dict[str, None]] = {}
    for setting in (setting for one in found for setting in one.settings if setting.shared):
        shared.setdefault(setting.shared, {})[str(setting)] = None
    return [f"options of {what}: {', '.join(settings)}" for what, settings in shared.items()]


def _show(one: Entry) -> None:
    options = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    for heading in ("option", "default", "takes"):
        options.add_column(heading, overflow="fold")
    for setting in one.settings:
        options.add_row(setting.name, default(setting.default), setting.takes)
    screen = console()
    screen.print(f"{one.name}: {one.summary}", *one.paragraphs, sep="\n\n")
    screen.print("", options, "", sep="\n")
    for turn in one.turns:
        lines = [f"phase {turn.name!r}", *(f"  {what}: {text}" for what, text in facts(turn))]
        screen.print(*lines, "", sep="\n")
    screen.print(kept(one))


def _write(folder: Path, texts: dict[str, str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write the pages to {folder}: {error.strerror}") from None
