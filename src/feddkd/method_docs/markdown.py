"""Documentation of methods as Markdown: one page for each method, and an index."""

from collections.abc import Iterable, Sequence
from textwrap import fill
from typing import Any

from feddkd.method_docs.entries import Entry, PhaseInWords

INDEX = "README.md"
COMPOSE = """\
Join methods with `|`: `fedprox(mu=0.1) | dkd()` trains with a proximal term and then distils.
`feddkd methods NAME` shows these pages on a terminal; `make methods-table` runs all methods on a
small job, with and without DKD."""

GATHERING = (
    "`clip`, `noise`, `gather` and `trim` clip the uploads, add noise to their mean or replace the"
    " mean: see [privacy](../privacy.md)."
)


def pages(entries: Iterable[Entry]) -> dict[str, str]:
    """Return the text of each page, and of the index, by file name."""
    listed = list(entries)
    return {INDEX: _index(listed), **{f"{entry.name}.md": page(entry) for entry in listed}}


def page(entry: Entry) -> str:
    """Return the page of one method."""
    parts = [
        f"<!-- made by `make methods-docs` from {entry.module}: change it there -->",
        f"# {entry.name}",
        entry.summary,
        *(one if "\n" in one or one.startswith(" ") else _lines(one) for one in entry.paragraphs),
    ]
    if entry.paper:
        parts.append(f"[{entry.paper.number}]({entry.paper.link})")
    if entry.piece:
        parts.append(f"Put it after a method that trains locally: `fedavg() | {entry.name}()`.")
    options = [(f"`{s.name}`", f"`{default(s.default)}`", s.takes) for s in entry.settings]
    parts += ["## Options", _table(("option", "default", "takes"), options)]
    if any(setting.shared == "gathering" for setting in entry.settings):
        parts.append(_lines(GATHERING))
    parts.append("## A round")
    if entry.turns:
        headings = [heading for heading, _ in facts(entry.turns[0])]
        rows = [(turn.name, *(text for _, text in facts(turn))) for turn in entry.turns]
        parts.append(_table(("phase", *headings), rows))
    parts.append(kept(entry))
    return "\n\n".join(parts) + "\n"


def _lines(prose: str) -> str:
    """Return a paragraph in lines of at most 120 characters."""
    return fill(prose, 120, break_long_words=False, break_on_hyphens=False)


def default(value: Any) -> str:
    """Return the default of an option in words."""
    return "must be given" if value is ... else repr(value)


def facts(turn: PhaseInWords) -> list[tuple[str, str]]:
    """Return (heading, text) pairs that describe a phase with default options."""
    stays = list(turn.keeps)
    stays += [f"{group} (this round)" for group in turn.leaves if group not in turn.keeps]
    texts = {
        "times": turn.times,
        "who": turn.who,
        "does": turn.does,
        "server sends": ", ".join(turn.sends),
        "clients upload": ", ".join(f"{group} ({rule})" for group, rule in turn.uploads.items()),
        "clients keep": ", ".join(stays),
    }
    return [(heading, text or "-") for heading, text in texts.items()]


def kept(entry: Entry) -> str:
    """Return a sentence that names the state a client keeps from round to round."""
    return f"From round to round a client keeps {', '.join(entry.keeps) or 'nothing'}."


def travels(entry: Entry) -> str:
    """Return one line: the groups that are sent, uploaded and kept."""
    sends = [group for group in entry.sends if not group.startswith("rate ")]
    return " / ".join(", ".join(part) or "-" for part in (sends, entry.uploads, entry.keeps))


def _index(entries: list[Entry]) -> str:
    """Return the page that lists all methods."""
    rows = [
        (f"[{e.name}]({e.name}.md)", e.summary, str(e.paper or ""), travels(e)) for e in entries
    ]
    origin = "<!-- made by `make methods-docs`: change the methods' own files -->"
    headings = ("method", "what it does", "paper", "sent / uploaded / kept by the client")
    return "\n\n".join([origin, "# Methods", COMPOSE, _table(headings, rows)]) + "\n"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = []
    for cells in (headings, ["---"] * len(headings), *rows):
        escaped = (cell.replace("|", "\\|") for cell in cells)
        lines.append(f"| {' | '.join(escaped)} |")
    return "\n".join(lines)
