"""Records -> tables: one line for each method, with mean and population standard deviation over its
seeds.
"""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from feddkd.reports.columns import WORST, WORST_GROUP, TableColumn, columns, metric_columns
from feddkd.reports.families import Family, families, headline_of, labels, target_of
from feddkd.reports.statistics import Paired
from feddkd.runs.record import Record
from feddkd.runs.summary import mean_and_std, summarise


def table(records: Sequence[Record]) -> Table:
    """Return the table as text: the headline metric, then what reaching the target cost."""
    heading = headline_of(records).heading
    title = f"{heading[0].upper()}{heading[1:]}"
    drawn = Table(title=title, box=SIMPLE_HEAD, padding=0, show_edge=False)
    drawn.caption, drawn.caption_justify = "\n".join(caption(records)), "left"
    (method, *headings), lines = grid(records)
    drawn.add_column(method, overflow="fold", min_width=13)
    for name in headings:
        drawn.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        drawn.add_row(*line)
    return drawn


def grid(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the lines of the table, as texts."""
    chosen, groups = columns(records), families(records)
    lines = []
    for label, group in zip(labels(groups), groups, strict=True):
        cells = [column.show(column.values(group)) for column in chosen]
        lines.append([label, *cells])
    return ["method", *(column.name for column in chosen)], lines


def as_json(records: Sequence[Record]) -> dict[str, Any]:
    """Return the numbers of the table; metrics are shares of 1, not percent."""
    target, chosen, groups = target_of(records), columns(records), families(records)
    lines = []
    for label, group in zip(labels(groups), groups, strict=True):
        seeds = [record.manifest["canonical"]["seed"] for record in group]
        sections = _sections(chosen, group)
        line = {"method": label, "family": group[0].manifest["family"], "seeds": seeds, **sections}
        lines.append({**line, "to_target": sections.get("to_target")})
    return {"target": None if target is None else target.value, "methods": lines}


def _sections(chosen: Sequence[TableColumn], group: Family) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {}
    for column in chosen:
        if column.section:
            section = sections.setdefault(column.section, {})
            section[column.key or column.name] = mean_in_json(column.values(group))
    return sections


def mean_in_json(values: list[float]) -> dict[str, float] | None:
    """Return number, mean and deviation of some values for JSON; None if there are none."""
    if not values:
        return None
    mean, deviation = mean_and_std(values)
    return {"n": len(values), "mean": mean, "std": deviation}


def caption(records: Sequence[Record]) -> list[str]:
    """Return lines that say what the columns mean; no number goes without its protocol."""
    target, metric = target_of(records), headline_of(records)
    protocols = sorted({record.manifest["protocol"]["test_accuracy"] for record in records})
    selections = sorted({summarise(record.history)["selection"] for record in records})
    lines = [
        f"{metric.title} of {'; or of '.join(protocols)}; mean ± population std over n seeds",
        f"best: at the {' or '.join(selections)}; last: at the end; average: before DKD in the last"
        " round",
    ]
    others = [column.name for column in metric_columns(records)[3:]]
    if others:
        lines.append(f"{', '.join(others)}: at the round of best")
    if WORST in others:
        lines.append(f"{WORST}: mean over the tenth of the clients with the worst {metric.title}")
    if WORST_GROUP in others:
        lines.append(f"{WORST_GROUP}: the group of test examples with the worst {metric.title}")
    ends = [record.history[-1] for record in records]
    deltas: set[float] = {end["delta"] for end in ends if "delta" in end}
    if deltas:
        numbers = " or ".join(f"{delta:.3g}" for delta in sorted(deltas))
        lines.append(f"epsilon: differential privacy of clients at the end, at delta {numbers}")
    if target is not None:
        lines.append(f"hit: seeds that reached {target.text}; then what that cost them on average")
    unfinished = sum(not record.finished for record in records)
    if unfinished:
        lines.append(f"unfinished runs, shown up to now: {unfinished} of {len(records)}")
    return lines


def paired_cells(test: Paired, digits: int = 2) -> list[str]:
    """Return the cells of a paired test: difference, its interval, the number of seeds in which it
    is positive, and two p values.
    """
    gap = test.difference
    interval = "-" if gap.low is None else f"{gap.low:+.{digits}f} to {gap.high:+.{digits}f}"
    chances = ["-" if p is None else f"{p:.2g}" for p in (test.t_p, test.wilcoxon_p)]
    return [f"{gap.mean:+.{digits}f}", interval, f"{test.wins} of {gap.n}", *chances]
