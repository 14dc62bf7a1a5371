"""Small tables of results, as text for a terminal and as HTML for a notebook."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from feddkd.runs.summary import summarise

LONGEST = 48  # characters of a method's text


def headings(target: float | None) -> list[str]:
    """Return the headings of the cells that `cells` returns."""
    reached = [] if target is None else [f"to {100 * target:g} %"]
    return ["method", "rounds", "accuracy", "best", *reached, "traffic"]


def cells(method: str, history: Sequence[Mapping[str, Any]], target: float | None) -> list[str]:
    """Return a run's method, rounds, accuracy at the end and at best, cost of the target, bytes."""
    short = method if len(method) <= LONGEST else f"{method[: LONGEST - 3]}..."
    if not history:
        return [short, "0", *["-"] * (len(headings(target)) - 2)]
    numbers = summarise([dict(row) for row in history], target)
    reached = numbers["to_target"]
    price = "never"
    if reached is not None:
        price = f"round {reached['round']}, {reached['communications']} communications"
    traffic = (numbers["bytes_up"] + numbers["bytes_down"]) / 1e6
    return [
        short,
        str(numbers["rounds"]),
        f"{100 * numbers['final_test_accuracy']:.2f} %",
        f"{100 * numbers['test_accuracy']:.2f} % (round {numbers['best_round']})",
        *([] if target is None else [price]),
        f"{traffic:.4g} MB",
    ]


def caption(history: Sequence[Mapping[str, Any]]) -> str:
    """Return what the accuracies of a run are."""
    by = "validation" if history and "validation_accuracy" in history[0] else "test"
    return f"accuracy: on the test set, after the last round; best: at the best {by} round"


def as_text(heads: Sequence[str], lines: Sequence[Sequence[str]], note: str) -> str:
    """Return a table as aligned text."""
    widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
    rows = []
    for line in (heads, *lines):
        padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        rows.append("  ".join(padded).rstrip())
    return "\n".join([*rows, *([note] if note else [])])


def as_html(heads: Sequence[str], lines: Sequence[Sequence[str]], note: str) -> str:
    """Return a table as HTML, for notebooks."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    body = ""
    for line in lines:
        body += "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>"
    return f"<table><caption>{escape(note)}</caption><tr>{top}</tr>{body}</table>"
