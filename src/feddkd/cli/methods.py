"""feddkd methods: every method with its paper, formula, options, and what travels and stays."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from feddkd.cli.console import AsJson, console, page, plain_table
from feddkd.errors import InputError
from feddkd.method_docs import snapshot
from feddkd.method_docs.entries import Entry
from feddkd.method_docs.markdown import default, facts, kept, pages, travels


def methods(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Show all facts of these methods."),
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write a Markdown page for each method there."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods: their papers, their options with defaults, what they send and keep.

    Compose them with |, as in fedavg() | dkd().
    """
    chosen = _entries(names or [], of_registry=markdown is not None)
    if markdown is not None:
        _write(markdown, pages(entry for entry in chosen if entry.own or names))
    elif as_json:
        # `...` stands for no default: null
        print(json.dumps({"methods": [_json(entry) for entry in chosen]}, default=lambda _: None))
    elif names:
        for entry in chosen:
            _show(entry)
    else:
        _list(chosen)


def _entries(names: list[str], of_registry: bool) -> list[Entry]:
    """Return the methods with these names, or all of them.

    They come from the file in the package if that has all of them: then torch is not loaded.
    """
    # a program that has loaded the registry may have added methods to it
    if not of_registry and "feddkd.methods" not in sys.modules and snapshot.is_complete():
        own = {entry.name: entry for entry in snapshot.read()}
        if all(name in own for name in names):
            return [own[name] for name in names] or list(own.values())
    from feddkd.method_docs import metadata

    return [metadata.entry(name) for name in names] or metadata.entries()


def _json(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "summary": entry.summary,
        "paper": None if entry.paper is None else asdict(entry.paper),
        "options": {setting.name: setting.default for setting in entry.settings},
        "behind": entry.piece,
        "sends": entry.sends,
        "uploads": entry.uploads,
        "keeps": entry.keeps,
        "phases": [asdict(turn) for turn in entry.turns],
        "text": entry.text,
    }


def _list(entries: list[Entry]) -> None:
    table = page("method", "what it does; paper; options; sent / uploaded / kept by the client")
    for entry in entries:
        options = [str(setting) for setting in entry.settings if not setting.shared]
        groups = [f"options of {setting.shared}" for setting in entry.settings if setting.shared]
        listed = ", ".join([*options, *dict.fromkeys(groups)])
        lines = entry.summary, str(entry.paper or ""), listed, travels(entry)
        table.add_row(entry.name, "\n".join(filter(None, lines)))
    table.caption, table.caption_justify = "\n".join(_shared(entries)), "left"
    console().print(table)


def _shared(entries: list[Entry]) -> list[str]:
    """Return a line for each group of options that many methods take."""
    groups: dict[str, dict[str, None]] = {}
    for entry in entries:
        for setting in entry.settings:
            if setting.shared:
                groups.setdefault(setting.shared, {})[str(setting)] = None
    return [f"options of {group}: {', '.join(options)}" for group, options in groups.items()]


def _show(entry: Entry) -> None:
    options = plain_table("option", "default", "takes", left=range(3))
    for setting in entry.settings:
        options.add_row(setting.name, default(setting.default), setting.takes)
    screen = console()
    screen.print(f"{entry.name}: {entry.summary}", *entry.paragraphs, sep="\n\n")
    screen.print("", options, "", sep="\n")
    for turn in entry.turns:
        lines = [f"phase {turn.name!r}", *(f"  {what}: {text}" for what, text in facts(turn))]
        screen.print(*lines, "", sep="\n")
    screen.print(kept(entry))


def _write(folder: Path, texts: dict[str, str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write the pages to {folder}: {error.strerror}") from None
