"""Small tables of results, as text for a terminal and as HTML for a notebook."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from feddkd.rounds.metrics import Metric, headline, read_target
from feddkd.runs.summary import summarise

LONGEST = 48  # characters of a method's text


def metric_of(history: Sequence[Mapping[str, Any]]) -> Metric:
    """Return the headline metric of a run, which may not have played a round."""
    return headline(history or [{}])


def headings(target: float | str | None, metric: Metric) -> list[str]:
    """Return the headings of the cells that `cells` returns."""
    reached = [] if target is None else [f"to {read_target(target, metric).text}"]
    return ["method", "rounds", metric.title, "best", *reached, "traffic"]


def cells(
    method: str, history: Sequence[Mapping[str, Any]], target: float | str | None
) -> list[str]:
    """Return a run's method, rounds, metric at the end and at best, cost of the target, bytes."""
    metric = metric_of(history)
    short = method if len(method) <= LONGEST else f"{method[: LONGEST - 3]}..."
    if not history:
        return [short, "0", *["-"] * (len(headings(target, metric)) - 2)]
    numbers = summarise([dict(row) for row in history], target)
    reached = numbers["to_target"]
    price = "never"
    if reached is not None:
        price = f"round {reached['round']}, {reached['communications']} communications"
    traffic = (numbers["bytes_up"] + numbers["bytes_down"]) / 1e6
    return [
        short,
        str(numbers["rounds"]),
        _text(metric, numbers[f"final_{metric.test_key}"]),
        f"{_text(metric, numbers[metric.test_key])} (round {numbers['best_round']})",
        *([] if target is None else [price]),
        f"{traffic:.4g} MB",
    ]


def caption(history: Sequence[Mapping[str, Any]]) -> str:
    """Return a line that says what the numbers of a run are."""
    metric = metric_of(history)
    by = "validation" if history and metric.validation_key in history[0] else "test"
    return f"{metric.title}: on the test set, after the last round; best: at the best {by} round"


def _text(metric: Metric, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{metric.scale * value:.{metric.digits}f}{metric.unit}"


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
