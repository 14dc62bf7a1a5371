"""The catalogue as Markdown: a page a method, and an index."""

from collections.abc import Iterable, Sequence
from typing import Any

from feddkd.method_docs.entries import Entry, PhaseInWords

INDEX = "README.md"
COMPOSE = """\
Compose them with `|`: `fedprox(mu=0.1) | dkd()` trains with a proximal term and then distils. `feddkd methods NAME` shows these
pages on a terminal; `make methods-table` runs all of them on a small job, with and without DKD."""

GATHERING = (
    "`clip`, `noise`, `gather` and `trim` bound and blur what clients upload:"
    " [privacy](../privacy.md)."
)


def pages(entries: Iterable[Entry]) -> dict[str, str]:
    """File name -> text."""
    listed = list(entries)
    return {INDEX: _index(listed), **{f"{entry.name}.md": page(entry) for entry in listed}}


def page(entry: Entry) -> str:
    """All there is to know of one method."""
    options = [(f"`{s.name}`", f"`{default(s.default)}`", s.takes) for s in entry.settings]
    exchanges = [(turn.name, *(text for _, text in facts(turn))) for turn in entry.turns]
    parts = [
        f"<!-- made by `make methods-docs` from {entry.module}: change it there -->",
        f"# {entry.name}",
        entry.summary,
        *entry.paragraphs,
        *([f"[{entry.paper.number}]({entry.paper.link})"] if entry.paper else []),
        *(
            [f"It goes behind a method that trains locally, as in `fedavg() | {entry.name}()`."]
            if entry.piece
            else []
        ),
        "## Options",
        _table(("option", "default", "takes"), options),
        *([GATHERING] if any(setting.shared == "gathering" for setting in entry.settings) else []),
        "## A round",
        *(
            [_table(("phase", *(what for what, _ in facts(entry.turns[0]))), exchanges)]
            if entry.turns
            else []
        ),
        kept(entry),
    ]
    return "\n\n".join(parts) + "\n"


def default(value: Any) -> str:
    return "must be given" if value is ... else repr(value)


def facts(turn: PhaseInWords) -> list[tuple[str, str]]:
    """A phase with default options: (what, text)."""
    stays = [
        *turn.keeps,
        *(f"{group} (this round)" for group in turn.leaves if group not in turn.keeps),
    ]
    texts = {
        "times": turn.times,
        "who": turn.who,
        "does": turn.does,
        "server sends": ", ".join(turn.sends),
        "clients upload": ", ".join(f"{group} ({rule})" for group, rule in turn.uploads.items()),
        "clients keep": ", ".join(stays),
    }
    return [(what, text or "-") for what, text in texts.items()]


def kept(entry: Entry) -> str:
    return f"From round to round a client keeps {', '.join(entry.keeps) or 'nothing'}."


def travels(entry: Entry) -> str:
    """What is sent, uploaded and kept, on one line."""
    parts = ([s for s in entry.sends if not s.startswith("rate ")], entry.uploads, entry.keeps)
    return " / ".join(", ".join(part) or "-" for part in parts)


def _index(entries: list[Entry]) -> str:
    rows = [
        (f"[{e.name}]({e.name}.md)", e.summary, str(e.paper or ""), travels(e)) for e in entries
    ]
    made = "<!-- made by `make methods-docs`: change the methods' own files -->"
    listed = _table(
        ("method", "what it does", "paper", "sent / uploaded / kept by the client"), rows
    )
    return "\n\n".join([made, "# Methods", COMPOSE, listed]) + "\n"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )
