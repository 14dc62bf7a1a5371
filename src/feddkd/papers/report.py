"""Writes docs/reproduction.md: all tables of a paper with verdicts, its figures, its open questions
and the results that do not match.
"""

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from feddkd.errors import InputError
from feddkd.papers.cells import NOTHING, PARTIAL
from feddkd.papers.comparison import Comparison, compare
from feddkd.papers.definitions import Paper
from feddkd.papers.figures import Curve, Figure, curves, figures
from feddkd.papers.results import Runs
from feddkd.papers.status import Progress, progress
from feddkd.papers.tables import markdown
from feddkd.reports.formats import piped

HEAD = """# The paper, reproduced

Written by `feddkd paper report` (`make reproduction`) from the records in `papers/feddkd/results`;
a test compares the page with them. *Within* means: the difference from the printed mean is at most
the printed standard deviation. A cell with fewer runs or rounds than the paper's is *partial*. *p*
is the probability of a difference this large by chance if both were from one experiment (Welch's
t-test; the printed side by its mean, deviation and number of runs).
[papers/feddkd](../papers/feddkd/README.md) lists the command that made each record."""
GLANCE = (
    "table",
    "runs",
    "rounds",
    "printed cells",
    "within",
    "better",
    "worse",
    "above or below",
    "p < 0.05",
    "partial",
    "nothing yet",
    "order of the methods",
)
NOT_KEPT = "(*) Measured while the settings were chosen, by runs that are not among the records."


def page(paper: Paper, runs: Runs, pictures: str) -> str:
    """Return the whole page; `pictures` is the folder of its pictures, relative to the page."""
    comparisons = [compare(paper, name, runs, begun=True) for name in paper.tables]
    tables, drawn = list[str](), list[str]()
    for comparison in comparisons:
        tables += _table(comparison)
    for figure in figures(paper).values():
        drawn += _figure(paper, figure, runs, pictures)
    parts = [
        HEAD,
        "## At a glance",
        _glance(comparisons, progress(paper, runs)),
        *tables,
        "## Figures",
        *drawn,
        *_findings(paper),
    ]
    return "\n\n".join(parts) + "\n"


def _glance(comparisons: Sequence[Comparison], done: Sequence[Progress]) -> str:
    by_table = done[:-1]  # the last is the total
    return piped(GLANCE, [_counted(*pair) for pair in zip(comparisons, by_table, strict=True)])


def _counted(comparison: Comparison, done: Progress) -> list[str]:
    printed = [cell for cell in comparison.cells if cell.printed is not None]
    verdicts = Counter(cell.verdict.removesuffix(" the printed spread") for cell in printed)
    verdicts["above or below"] = verdicts["above"] + verdicts["below"]
    whole = [order for order in comparison.orders if order.complete]
    pairs, swapped = sum(order.pairs for order in whole), sum(len(order.swapped) for order in whole)
    order_text = (
        f"holds in {sum(order.holds for order in whole)} of {len(whole)} whole columns,"
        f" {pairs - swapped} of {pairs} pairs"
    )
    chances = [cell.chance for cell in printed if cell.chance is not None]
    unlikely = f"{sum(chance < 0.05 for chance in chances)} of {len(chances)}" if chances else "-"
    numbers = [
        len(printed),
        *(verdicts[name] for name in ("within", "better", "worse", "above or below")),
    ]
    return [
        f"`{comparison.table.name}`",
        f"{done.runs_done}/{done.runs_wanted}",
        f"{done.rounds_done}/{done.rounds_wanted}",
        *map(str, numbers),
        unlikely,
        str(verdicts[PARTIAL]),
        str(verdicts[NOTHING]),
        order_text if whole else "-",
    ]


def _table(comparison: Comparison) -> list[str]:
    """Return the cells that have runs, and the number of the others."""
    if not comparison.shown:
        return [
            f"## {comparison.table.title}",
            f"`{comparison.table.name}`: nothing has been run yet.",
        ]
    title, _, rest = markdown(comparison).rstrip().partition("\n")
    others = len(comparison.cells) - len(comparison.shown)
    of_all = f"; of {others} more cells there is nothing yet" if others else ""
    return [
        title,
        f"`feddkd paper table {comparison.table.name}`{of_all}.",
        rest.strip().replace("\n## ", "\n### "),
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
        return [f"### {figure.title}", f"`{figure.name}`: there are no runs to draw yet."]
    gaps: dict[str, list[str]] = {}
    for title, panel in panels.items():
        for curve in panel:
            gaps.setdefault(curve.missing, []).append(f"{curve.method} ({title})")
    gaps.pop("", None)
    lines = [f"{missing}: {', '.join(names)}" for missing, names in gaps.items()]
    picture = f"![{figure.title}]({pictures}/{figure.name}.png)"
    return [f"### {figure.title}", picture, f"Partial; {'; '.join(lines)}." if lines else "Whole."]


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
        "## What the paper leaves open, and what calibration showed",
        "[Decisions](decisions.md) has what was decided, and why.",
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
