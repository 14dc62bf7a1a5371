"""Writes a table and the printed one as text, Markdown, LaTeX or JSON."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from textwrap import fill
from typing import Any

from feddkd.papers.cells import PARTIAL, Cell, MethodOrder
from feddkd.papers.comparison import Comparison
from feddkd.reports.formats import Grid, aligned, piped, tabular
from feddkd.reports.statistics import Paired, Spread

HEADINGS = (
    "setting",
    "method",
    "quantity",
    "printed",
    "ours",
    "difference",
    "p",
    "runs",
    "rounds",
    "verdict",
)
SPREADS = (
    "setting",
    "method",
    "quantity",
    "seeds",
    "mean",
    "median",
    "std (population)",
    "std (sample)",
    "95 % interval",
)
TESTS = (
    "setting",
    "lead against",
    "quantity",
    "seeds",
    "higher in",
    "difference",
    "95 % interval",
    "p (t)",
    "p (Wilcoxon)",
)


def text(comparison: Comparison) -> str:
    """Return a comparison as aligned text."""
    return _written(comparison, aligned, "{}".format)


def markdown(comparison: Comparison) -> str:
    """Return a comparison as Markdown."""
    return _written(comparison, piped, "## {}".format, _lines)


def latex(comparison: Comparison) -> str:
    """Return a comparison as LaTeX tabulars with comments; it needs no packages."""
    return _written(comparison, tabular, "% {}".format, "% {}".format)


def _lines(note: str) -> str:
    """Return a note in lines of at most 120 characters; a list item is indented."""
    indent = "  " if note.startswith("* ") else ""
    wrapped = fill(note, 120, break_long_words=False, break_on_hyphens=False)
    return wrapped.replace("\n", f"\n{indent}")


FORMATS: Mapping[str, Callable[[Comparison], str]] = {
    "text": text,
    "markdown": markdown,
    "latex": latex,
}


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as JSON."""
    return {
        "name": comparison.table.name,
        "title": comparison.table.title,
        "note": comparison.table.note,
        "cells": [
            {**_cell_json(cell), "not_ahead_of": comparison.behind(cell)}
            for cell in comparison.cells
        ],
        "orders": [{**asdict(order), "holds": order.holds} for order in comparison.orders],
        "lead": comparison.table.lead,
        "spreads": [{**_where(cell), **asdict(numbers)} for cell, numbers in comparison.spreads],
        "tests": [{**_where(cell), **asdict(test)} for cell, test in comparison.tests],
    }


def _cell_json(cell: Cell) -> dict[str, Any]:
    ours = None if cell.ours is None else {"mean": cell.ours[0], "std": cell.ours[1]}
    return {
        **_where(cell),
        "printed": None if cell.printed is None else asdict(cell.printed),
        "ours": ours,
        "difference": cell.difference,
        "p": cell.chance,
        "runs": len(cell.readings),
        "runs_wanted": cell.runs_wanted,
        "rounds": cell.rounds,
        "rounds_wanted": cell.rounds_wanted,
        "target_missed": cell.missed,
        "broke_off": cell.broke_off,
        "verdict": cell.verdict,
        "so_far": cell.tendency if cell.verdict == PARTIAL else None,
    }


def _where(cell: Cell) -> dict[str, str]:
    return {
        "setting": cell.place.setting,
        "method": cell.place.method,
        "quantity": cell.place.quantity,
    }


def _written(
    comparison: Comparison,
    grid: Grid,
    heading: Callable[[str], str],
    plain: Callable[[str], str] = "{}".format,
) -> str:
    parts = [
        heading(comparison.table.title),
        grid(
            HEADINGS,
            [[*_line(cell), _verdict(cell, comparison.behind(cell))] for cell in comparison.shown],
        ),
    ]
    parts += [plain(note) for note in _notes(comparison)]
    if comparison.orders:
        parts += [
            heading("Order of the methods"),
            *(plain(_order_line(order)) for order in comparison.orders),
        ]
    if comparison.spreads:
        parts += [
            heading("Over seeds, of runs whose number is final"),
            grid(SPREADS, [_spread_line(*one) for one in comparison.spreads]),
        ]
    if comparison.tests:
        parts += [heading(f"{comparison.table.lead} against the others, seed by seed")]
        parts += [grid(TESTS, [_test_line(*one) for one in comparison.tests])]
    return "\n\n".join(parts) + "\n"


def _line(cell: Cell) -> list[str]:
    digits = cell.quantity.decimals
    ours = "-" if cell.ours is None else f"{cell.ours[0]:.{digits}f} ± {cell.ours[1]:.{digits}f}"
    return [
        *_where(cell).values(),
        "-" if cell.printed is None else f"{cell.printed}{'*' if cell.printed.note else ''}",
        ours,
        "-" if cell.difference is None else f"{cell.difference:+.{digits}f}",
        _chance(cell.chance),
        f"{len(cell.readings)}/{cell.runs_wanted}",
        f"{cell.rounds}/{cell.rounds_wanted}",
    ]


def _verdict(cell: Cell, behind: Sequence[str]) -> str:
    so_far = f", so far {cell.tendency}" if cell.verdict == PARTIAL else ""
    missed = f"; target missed in {_runs(cell.missed)}" if cell.missed else ""
    broke_off = f"; {_runs(cell.broke_off)} broke off" if cell.broke_off else ""
    not_ahead = f"; not ahead of {', '.join(behind)}" if behind else ""
    return f"{cell.verdict}{so_far}{missed}{broke_off}{not_ahead}"


def _runs(count: int) -> str:
    return f"{count} {'run' if count == 1 else 'runs'}"


def _notes(comparison: Comparison) -> list[str]:
    """Return the table's note, and the notes on printed cells, each once."""
    quantities: dict[tuple[str, str, str], list[str]] = {}
    for cell in comparison.shown:
        if cell.printed is not None and cell.printed.note:
            place = cell.place
            key = place.method, place.setting, cell.printed.note
            quantities.setdefault(key, []).append(place.quantity)
    lines = [
        f"* {method}, {setting}, {', '.join(names)}: {note}"
        for (method, setting, note), names in quantities.items()
    ]
    return [comparison.table.note, *lines] if comparison.table.note else lines


def _order_line(order: MethodOrder) -> str:
    start = f"{order.setting}, {order.quantity}: "
    of_what = "" if order.complete else " of what there is so far"
    if order.holds:
        count = f"{order.pairs} {'pair' if order.pairs == 1 else 'pairs'}"
        return f"{start}the printed order{of_what} holds ({count})"
    pairs = ", ".join(f"{first} before {second}" for first, second in order.swapped)
    return (
        f"{start}the printed order{of_what} does not hold ({len(order.swapped)} of {order.pairs}"
        f" pairs): not {pairs}"
    )


def _spread_line(cell: Cell, numbers: Spread) -> list[str]:
    show = _shown(cell)
    columns = [
        show(numbers.mean),
        show(numbers.median),
        show(numbers.population_std),
        show(numbers.sample_std),
    ]
    return [
        *_where(cell).values(),
        str(numbers.n),
        *columns,
        _interval(show(numbers.low), show(numbers.high)),
    ]


def _test_line(cell: Cell, test: Paired) -> list[str]:
    show, gap = _shown(cell, "+"), test.difference
    return [
        *_where(cell).values(),
        str(gap.n),
        str(test.wins),
        show(gap.mean),
        _interval(show(gap.low), show(gap.high)),
        _chance(test.t_p),
        _chance(test.wilcoxon_p),
    ]


def _shown(cell: Cell, sign: str = "") -> Callable[[float | None], str]:
    return lambda number: (
        "-" if number is None else f"{number:{sign}.{max(cell.quantity.decimals, 1)}f}"
    )


def _chance(p: float | None) -> str:
    return "-" if p is None else f"{p:.2g}"


def _interval(low: str, high: str) -> str:
    return "-" if low == "-" else f"{low} to {high}"
