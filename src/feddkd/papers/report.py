"""Writes docs/reproduction.md, a summary, and docs/reproduction/: a page for each table with
verdicts, the figures, the open questions and the results that do not match.
"""

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from feddkd.errors import InputError
from feddkd.papers.cells import PARTIAL, Cell
from feddkd.papers.comparison import Comparison, compare
from feddkd.papers.definitions import Paper
from feddkd.papers.evidence import (
    Direction,
    detectable,
    directions,
    independent,
    power,
    unlikely,
    whole,
)
from feddkd.papers.figures import Curve, Figure, curves, figures
from feddkd.papers.results import Runs
from feddkd.papers.status import Progress, progress
from feddkd.papers.tables import markdown
from feddkd.reports.formats import piped

HEAD = """# The paper, reproduced

Written by `feddkd paper report` (`make reproduction`) from the records in `papers/feddkd/results`;
a test compares the pages with them, and `tools/recompute.py`, which does not use the package,
computes each number again. [papers/feddkd](../papers/feddkd/README.md) has the command behind each
record.

*Within* means: the difference from the printed mean is at most the printed standard deviation. A
cell with fewer runs or rounds than the paper's is *partial*. *p* is the probability of a difference
this large by chance if both were from one experiment (Welch's t-test; the printed side by its mean,
deviation and number of runs); it is not corrected for the number of cells."""
GLANCE = (
    "table",
    "runs",
    "printed cells",
    "within",
    "better",
    "worse",
    "above or below",
    "partial",
    "independent figures",
    "p < 0.05",
    "order of the methods",
)
SAME_FIGURE = """Rounds, communications and local steps to a target are one figure where one is a
multiple of the other; here each figure counts once, and tables that hold other runs, or the first
rounds of the same runs, against the same printed cells do not count again. The test's power (by
simulation) says what it can find: a shift of the mean by one deviation of a run, by two, and the
shift that it finds four times in five."""
POWER = (
    "runs on each side",
    "figures",
    "p < 0.05",
    "expected by chance",
    "power at 1",
    "power at 2",
    "80 % power at",
)
ONE_SIDED = """More can be seen in the side on which ours lie, over the whole cells of a method. The
cells of one table share their splits, so the p values of this sign test are too small."""
SIDES = ("table", "method", "quantity", "below print", "above", "mean difference", "p (sign)")
NOT_KEPT = "(*) Measured while the settings were chosen, by runs that are not among the records."
P_COLUMN = "p: Welch's t-test of ours against the printed mean, deviation and number of runs."


def pages(paper: Paper, runs: Runs, pictures: str, stem: str) -> dict[str, str]:
    """Return the summary, under "", and the pages that go into the folder `stem` beside it, by
    name; `pictures` is the folder of pictures beside the summary.
    """
    comparisons = [compare(paper, name, runs, begun=True) for name in paper.tables]
    done = {one.name: one for one in progress(paper, runs)}
    details = {
        one.table.name: _join(*_table(one), f"[All tables](../{stem}.md)") for one in comparisons
    }
    drawn = [_figure(paper, one, runs, f"../{pictures}") for one in figures(paper).values()]
    more = {"figures": ["# Figures", *chain.from_iterable(drawn)], "open": _findings(paper)}
    details |= {name: _join(*parts) for name, parts in more.items() if len(parts) > 1}
    return {"": _summary(comparisons, done, stem, "open" in details), **details}


def _join(*parts: str) -> str:
    return "\n\n".join(parts) + "\n"


def _summary(
    comparisons: Sequence[Comparison], done: Mapping[str, Progress], stem: str, opened: bool
) -> str:
    compared = [one for one in comparisons if any(cell.printed for cell in one.cells)]
    names = {one.table.name for one in compared}
    others = [one.table.name for one in comparisons if one.table.name not in names]
    links = ", ".join(f"[{name}]({stem}/{name}.md)" for name in others)
    more = "[What the paper leaves open, and what does not match]"
    return _join(
        HEAD,
        piped(GLANCE, [_counted(one, done[one.table.name], stem) for one in compared]),
        *_evidence(compared),
        *(
            [f"Calibration and searches, with nothing printed to compare: {links}."]
            if links
            else []
        ),
        *([f"{more}({stem}/open.md). [Figures]({stem}/figures.md)."] if opened else []),
    )


def _evidence(compared: Sequence[Comparison]) -> list[str]:
    """Return what the cells say together, each independent figure once."""
    first = [one for one in compared if not one.table.beside]  # another reading counts no run twice
    known = chain.from_iterable(independent(whole(one)) for one in first)
    by_runs: dict[int, list[Cell]] = {}
    for cell in known:
        if cell.printed is not None and cell.printed.runs and cell.chance is not None:
            by_runs.setdefault(cell.printed.runs, []).append(cell)
    lines = [_direction(one) for comparison in first for one in directions(comparison)]
    if not by_runs:
        return []
    return [
        "## Evidence, each figure once",
        SAME_FIGURE,
        piped(POWER, [_power(runs, cells) for runs, cells in sorted(by_runs.items())]),
        *([ONE_SIDED, piped(SIDES, lines)] if lines else []),
    ]


def _power(runs: int, cells: Sequence[Cell]) -> list[str]:
    hits, of = unlikely(cells)
    shares = [f"{100 * power(runs, shift):.0f} %" for shift in (1.0, 2.0)]
    expected = f"{power(runs, 0.0) * of:.1f}"
    shift = detectable(runs)
    found = "more than 8" if shift is None else f"{shift:.1f}"
    return [str(runs), str(of), str(hits), expected, *shares, found]


def _direction(one: Direction) -> list[str]:
    mean, chance = f"{one.difference:+.{one.decimals}f}", f"{one.chance:.2g}"
    return [one.table, one.method, one.quantity, str(one.below), str(one.above), mean, chance]


def _counted(comparison: Comparison, done: Progress, stem: str) -> list[str]:
    printed = [cell for cell in comparison.cells if cell.printed is not None]
    verdicts = Counter(cell.verdict.removesuffix(" the printed spread") for cell in printed)
    verdicts["above or below"] = verdicts["above"] + verdicts["below"]
    whole_columns = [order for order in comparison.orders if order.complete]
    pairs = sum(order.pairs for order in whole_columns)
    swapped = sum(len(order.swapped) for order in whole_columns)
    order_text = (
        f"holds in {sum(order.holds for order in whole_columns)} of {len(whole_columns)} whole"
        f" columns, {pairs - swapped} of {pairs} pairs"
    )
    figures_ = independent(whole(comparison))
    hits, of = unlikely(figures_)
    words = ("within", "better", "worse", "above or below", PARTIAL)
    return [
        f"[{comparison.table.name}]({stem}/{comparison.table.name}.md)",
        f"{done.runs_done}/{done.runs_wanted}",
        str(len(printed)),
        *(str(verdicts[word]) for word in words),
        str(len(figures_)),
        f"{hits} of {of}" if of else "-",
        order_text if whole_columns else "-",
    ]


def _table(comparison: Comparison) -> list[str]:
    """Return the cells that have runs, and the number of the others."""
    if not comparison.shown:
        return [
            f"# {comparison.table.title}",
            f"`{comparison.table.name}`: nothing has been run yet.",
        ]
    title, _, rest = markdown(comparison).rstrip().partition("\n")
    others = len(comparison.cells) - len(comparison.shown)
    of_all = f"; of {others} more cells there is nothing yet" if others else ""
    return [
        title.removeprefix("#"),
        f"`feddkd paper table {comparison.table.name}`{of_all}.",
        rest.strip(),
        *([P_COLUMN] if any(cell.chance is not None for cell in comparison.shown) else []),
    ]


def shown(paper: Paper, figure: Figure, runs: Runs) -> dict[str, list[Curve]]:
    """Return a figure's pictures by title, also those without any curve."""
    return {title: curves(paper, figure, panel, runs) for title, panel in figure.panels.items()}


def drawable(panels: Mapping[str, Sequence[Curve]]) -> bool:
    """Return True if there is a curve to draw."""
    return any(curve.seeds for panel in panels.values() for curve in panel)


def _figure(paper: Paper, figure: Figure, runs: Runs, pictures: str) -> list[str]:
    panels = shown(paper, figure, runs)
    if not drawable(panels):
        return [f"## {figure.title}", f"`{figure.name}`: there are no runs to draw yet."]
    gaps: dict[str, list[str]] = {}
    for title, panel in panels.items():
        for curve in panel:
            gaps.setdefault(curve.missing, []).append(f"{curve.method} ({title})")
    gaps.pop("", None)
    lines = [f"{missing}: {', '.join(names)}" for missing, names in gaps.items()]
    picture = f"![{figure.title}]({pictures}/{figure.name}.png)"
    return [f"## {figure.title}", picture, f"Partial; {'; '.join(lines)}." if lines else "Whole."]


def _findings(paper: Paper) -> list[str]:
    """Return the parts of findings.toml, if the paper has one."""
    file = paper.folder / "findings.toml"
    if not file.exists():
        return []
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
        return [*_open(content["open"]), *_mismatches(content["mismatch"])]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} cannot be read: {error!r}") from None


def _open(questions: Sequence[Mapping[str, Any]]) -> list[str]:
    measured = [entry for entry in questions if "showed" in entry]
    rest = "; ".join(entry["question"] for entry in questions if "showed" not in entry)
    lines = [
        [entry["question"], entry["showed"] + ("" if entry.get("kept", True) else " (*)")]
        for entry in measured
    ]
    return [
        "# What the paper leaves open, and what calibration showed",
        "[Decisions](../decisions.md) has what was decided, and why.",
        piped(("question", "what calibration showed"), lines),
        *([NOT_KEPT] if not all(entry.get("kept", True) for entry in measured) else []),
        f"Decided by argument alone, nothing measured: {rest}.",
    ]


def _mismatches(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        [", ".join(f"`{name}`" for name in entry["tables"]), entry["what"], entry["why"]]
        for entry in entries
    ]
    return [
        "## What does not match, and the best explanation",
        piped(("tables", "what", "why"), lines),
    ]
