"""The package's own methods in a JSON file, so that they are listed without loading torch.

`make methods-docs` writes the file: `python -m feddkd.method_docs.snapshot`. A test compares it
with the registry.
"""

import json
from dataclasses import asdict
from importlib import resources
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from feddkd.method_docs.entries import Citation, Entry, MethodOption, PhaseInWords

FILE = "methods.json"


def is_complete() -> bool:
    """Return whether the file has all methods: no plug-in is installed."""
    return not entry_points(group="feddkd.methods")


def read() -> list[Entry]:
    """Return the methods in the file."""
    text = resources.files(__package__).joinpath(FILE).read_text("utf-8")
    return [_entry(content) for content in json.loads(text)]


def as_text(entries: list[Entry]) -> str:
    """Return the content of the file for some methods."""
    contents = []
    for entry in entries:
        content = asdict(entry)
        for option in content["settings"]:
            if option["default"] is ...:  # there is no default
                del option["default"]
        contents.append(content)
    return json.dumps(contents, indent=1) + "\n"


def _entry(content: dict[str, Any]) -> Entry:
    paper = content["paper"]
    return Entry(
        **{
            **content,
            "paper": None if paper is None else Citation(**paper),
            "settings": tuple(MethodOption(**{"default": ..., **s}) for s in content["settings"]),
            "turns": tuple(_phase(turn) for turn in content["turns"]),
        }
    )


def _phase(content: dict[str, Any]) -> PhaseInWords:
    lists = {key: tuple(value) for key, value in content.items() if isinstance(value, list)}
    return PhaseInWords(**{**content, **lists})


def write() -> None:
    """Write the file from the registry."""
    from feddkd.method_docs.metadata import entries

    own = [entry for entry in entries() if entry.own]
    (Path(__file__).parent / FILE).write_text(as_text(own), encoding="utf-8")


if __name__ == "__main__":
    write()
