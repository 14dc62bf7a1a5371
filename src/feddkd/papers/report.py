"""docs/reproduction.md:

all tables of a paper with verdicts, its figures, what it leaves open and what does not match.
"""

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from feddkd.errors import InputError
from feddkd.papers.compare import NOTHING, PARTIAL
from feddkd.papers.definitions import Paper
from feddkd.papers.figures import Curve, Figure, curves, figures
from feddkd.papers.results import Runs
from feddkd.papers.status import Progress, progress
from feddkd.papers.tables import Comparison, compare, markdown
from feddkd.reports.formats import piped

HEAD = """# The paper, reproduced

Written by `feddkd paper report` (`make reproduction`) from the records in `papers/feddkd/results`, as they came out; a test
holds it to them. *Within* means: no further from the printed mean than the printed standard deviation. What rests on fewer
runs or rounds than the paper's is *partial*. *p* is how likely ours and the printed mean would lie so far apart by chance if
both were of one experiment (Welch's t-test; the printed side by its mean, deviation and number of runs).
[papers/feddkd](../papers/feddkd/README.md) tells which command made which record."""
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
    """The whole page; `pictures` is where its pictures lie, as seen from it."""
    found = [compare(paper, name, runs, begun=True) for name in paper.tables]
    tables = [part for one in found for part in _table(one)]
    drawn = [
        part
        for figure in figures(paper).values()
        for part in _figure(paper, figure, runs, pictures)
    ]
    parts = [
        HEAD,
        "## At a glance",
        _glance(found, progress(paper, runs)),
        *tables,
        "## Figures",
        *drawn,
        *_findings(paper),
    ]
    return "\n\n".join(parts) + "\n"


def _glance(found: Sequence[Comparison], done: Sequence[Progress]) -> str:
    # the last is of all together
    return piped(GLANCE, [_counted(one, its) for one, its in zip(found, done[:-1], strict=True)])


def _counted(found: Comparison, done: Progress) -> list[str]:
    printed = [cell for cell in found.cells if cell.printed is not None]
    verdicts = Counter(cell.verdict.removesuffix(" the printed spread") for cell in printed)
    verdicts["above or below"] = verdicts["above"] + verdicts["below"]
    whole = [order for order in found.orders if order.complete]
    pairs, swapped = sum(order.pairs for order in whole), sum(len(order.swapped) for order in whole)
    held = (
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
        f"`{found.table.name}`",
        f"{done.runs_done}/{done.runs_wanted}",
        f"{done.rounds_done}/{done.rounds_wanted}",
        *map(str, numbers),
        unlikely,
        str(verdicts[PARTIAL]),
        str(verdicts[NOTHING]),
        held if whole else "-",
    ]


def _table(found: Comparison) -> list[str]:
    """Those cells of which there is something, and how many others there are."""
    if not found.shown:
        return [f"## {found.table.title}", f"`{found.table.name}`: nothing has been run yet."]
    title, _, rest = markdown(found).rstrip().partition("\n")
    others = len(found.cells) - len(found.shown)
    of_all = f"; of {others} more cells there is nothing yet" if others else ""
    return [
        title,
        f"`feddkd paper table {found.table.name}`{of_all}.",
        rest.strip().replace("\n## ", "\n### "),
    ]


def shown(paper: Paper, figure: Figure, runs: Runs) -> dict[str, list[Curve]]:
    """A figure's pictures by title, those without any curve, too."""
    return {title: curves(paper, figure, panel, runs) for title, panel in figure.panels.items()}


def drawable(panels: Mapping[str, Sequence[Curve]]) -> bool:
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
    told = [f"{missing}: {', '.join(who)}" for missing, who in gaps.items()]
    picture = f"![{figure.title}]({pictures}/{figure.name}.png)"
    return [f"### {figure.title}", picture, f"Partial; {'; '.join(told)}." if told else "Whole."]


def _findings(paper: Paper) -> list[str]:
    """From findings.toml, where a paper has one."""
    file = paper.folder / "findings.toml"
    if not file.exists():
        return []
    try:
        said = tomllib.loads(file.read_text(encoding="utf-8"))
        return [*_open(said["open"]), *_mismatches(said["mismatch"])]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} cannot be read: {error!r}") from None


def _open(questions: Sequence[Mapping[str, Any]]) -> list[str]:
    measured = [one for one in questions if "showed" in one]
    rest = "; ".join(one["question"] for one in questions if "showed" not in one)
    lines = [
        [one["question"], one["showed"] + ("" if one.get("kept", True) else " (*)")]
        for one in measured
    ]
    return [
        "## What the paper leaves open, and what calibration showed",
        "[Decisions](decisions.md) has what was decided, and why.",
        piped(("question", "what calibration showed"), lines),
        *([NOT_KEPT] if not all(one.get("kept", True) for one in measured) else []),
        f"Decided by argument alone, nothing measured: {rest}.",
    ]


def _mismatches(found: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        [", ".join(f"`{name}`" for name in one["tables"]), one["what"], one["why"]] for one in found
    ]
    return [
        "## What does not match, and the best explanation",
        piped(("tables", "what", "why"), lines),
    ]
