"""Records -> tables: one line for each method, with mean and population standard deviation over its
seeds.

A `TableColumn` says once what it is called, how it is computed and how it is shown. Text, Markdown,
LaTeX, JSON and the page read the columns.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from feddkd.reports.statistics import Paired
from feddkd.rounds.metrics import Metric, headline, shown_in
from feddkd.runs.record import Counts, Record
from feddkd.runs.summary import best_row, mean_and_std, summarise, to_target

if TYPE_CHECKING:  # tables of records need no torch
    from feddkd.data.batches import Indices

Family = Sequence[Record]  # runs that differ in their seeds alone


@dataclass(frozen=True)
class TableColumn:
    """A column of the table: its values for a family of runs, and how they are shown."""

    name: str  # its heading
    values: Callable[[Family], list[float]]  # seed by seed, for the seeds that have a value
    show: Callable[[list[float]], str]
    section: str = ""  # the JSON object with its mean and deviation; none if empty
    key: str = ""  # in that object; the name if empty
    scale: int = 1  # the factor between a value and the number that is shown
    digits: int = 2  # decimal places of a difference


# --- the columns


def columns(records: Sequence[Record]) -> list[TableColumn]:
    """Return the columns of a table of these records."""
    target = target_of(records)
    costs = [COUNT] if target is None else target_columns(target)
    private = any("epsilon" in record.history[-1] for record in records)
    return [*metric_columns(records), *costs, *([EPSILON] if private else [])]


def metric_columns(records: Sequence[Record]) -> list[TableColumn]:
    """Return the columns of metrics: best, last and average of the headline, then the others."""
    first = headline_of(records)
    others = dict.fromkeys(metric for record in records for metric in shown_in(record.history[0]))
    return [
        _metric_column(first, "best", first.test_key, best_row),
        _metric_column(first, "last", first.test_key, _last_row),
        _metric_column(first, "average", first.average_key, _last_row),
        *(
            _metric_column(other, other.title, other.test_key, best_row, key="best")
            for other in others
            if other != first
        ),
    ]


def _metric_column(
    metric: Metric, name: str, row_key: str, pick: Callable[..., Any], key: str = ""
) -> TableColumn:
    """Return a column with the value that is under a key of one row of each record."""

    def values(family: Family) -> list[float]:
        found = [pick(record.history).get(row_key) for record in family]
        return [value for value in found if value is not None]

    show = partial(mean_text, metric=metric)
    return TableColumn(name, values, show, metric.test_key, key, metric.scale, metric.digits)


def _last_row(history: Sequence[Any]) -> Any:
    return history[-1]


def target_columns(target: float) -> list[TableColumn]:
    """Return the columns about the seeds that reached a target, and what that cost them."""

    def hits(family: Family) -> list[float]:
        return [float(to_target(record.history, target) is not None) for record in family]

    def costs(family: Family, cost: Callable[[dict[str, Any]], float]) -> list[float]:
        reached = [to_target(record.history, target) for record in family]
        return [cost(one) for one in reached if one is not None]

    amounts: dict[str, Callable[[dict[str, Any]], float]] = {
        "rounds": lambda reached: reached["round"],
        "comms": lambda reached: reached["communications"],
        "steps": lambda reached: reached["local_steps"],
        "MB": lambda reached: (reached["bytes_up"] + reached["bytes_down"]) / 1e6,
    }
    return [
        TableColumn("hit", hits, lambda reached: f"{sum(reached):.0f}/{len(reached)}"),
        *(
            TableColumn(name, partial(costs, cost=amount), _cost_text, "to_target")
            for name, amount in amounts.items()
        ),
    ]


def _epsilons(family: Family) -> list[float]:
    """Return the epsilon at the end of each run. Records hold null for infinity."""
    ends = [record.history[-1] for record in family]
    found = [end["epsilon"] for end in ends if "epsilon" in end]
    return [np.inf if epsilon is None else epsilon for epsilon in found]


def _epsilon_text(values: list[float]) -> str:
    """Return the epsilon of the first seed: it is the same for all of them."""
    if not values:
        return "-"
    return "infinite" if np.isinf(values[0]) else f"{values[0]:.2f}"


def _cost_text(values: list[float]) -> str:
    if not values:
        return "-"
    mean, _ = mean_and_std(values)
    return f"{mean:.4g}" if mean < 1000 else f"{mean:.0f}"


def mean_text(values: list[float], metric: Metric) -> str:
    """Return mean and deviation of a metric's values as a table shows them."""
    if not values:
        return "-"
    mean, deviation = (metric.scale * number for number in mean_and_std(values))
    return f"{mean:.{metric.digits}f}±{deviation:.{metric.digits}f}"


COUNT = TableColumn("n", lambda family: [1.0] * len(family), lambda ones: str(len(ones)))
EPSILON = TableColumn("epsilon", _epsilons, _epsilon_text)


# --- tables


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
    return {"target": target, "methods": lines}


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
    ends = [record.history[-1] for record in records]
    deltas: set[float] = {end["delta"] for end in ends if "delta" in end}
    if deltas:
        numbers = " or ".join(f"{delta:.3g}" for delta in sorted(deltas))
        lines.append(f"epsilon: differential privacy of clients at the end, at delta {numbers}")
    if target is not None:
        goal = f"{metric.scale * target:g}{metric.unit}"
        lines.append(f"hit: seeds that reached {goal}; then what that cost them on average")
    unfinished = sum(not record.finished for record in records)
    if unfinished:
        lines.append(f"unfinished runs, shown up to now: {unfinished} of {len(records)}")
    return lines


# --- what the records have in common


def target_of(records: Sequence[Record]) -> float | None:
    """Return the target of the first record that has one: a value of its headline metric."""
    for record in records:
        if "target" in record.manifest["experiment"]:
            target: float = record.manifest["experiment"]["target"]
            return target
    return None


def headline_of(records: Sequence[Record]) -> Metric:
    """Return the headline metric of the first record."""
    return headline(records[0].history)


def families(records: Sequence[Record]) -> list[list[Record]]:
    """Group the records that differ in their seeds alone."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.manifest["family"], []).append(record)
    return list(groups.values())


def labels(groups: list[list[Record]]) -> list[str]:
    """Return a name for each family: the user's, or that of its methods without options; a longer
    one where two would be the same.
    """
    whole = [group[0].label for group in groups]
    short = [_short_name(group[0]) for group in groups]
    more = _differences([group[0].manifest for group in groups])
    schemes = (
        short,
        [name + rest for name, rest in zip(short, more, strict=True)],
        whole,
        [name + rest for name, rest in zip(whole, more, strict=True)],
    )
    chosen = []
    for number, default in enumerate(whole):
        unique = [names[number] for names in schemes if names.count(names[number]) == 1]
        chosen.append(unique[0] if unique else default)
    return chosen


def _short_name(record: Record) -> str:
    return record.manifest["experiment"].get("name") or method_names(record)


def _differences(manifests: Sequence[dict[str, Any]]) -> list[str]:
    """Return for each manifest a text with the keys that are not the same in all of them."""
    every = dict.fromkeys(key for manifest in manifests for key in manifest["canonical"])
    keys = [key for key in every if key not in ("method", "seed", "split_seed")]
    unlike = [key for key in keys if len({m["canonical"].get(key) for m in manifests}) > 1]
    texts = []
    for manifest in manifests:
        spelled, canonical = manifest["experiment"], manifest["canonical"]
        parts = [f", {key} {spelled.get(key, canonical.get(key))}" for key in unlike]
        texts.append("".join(parts))
    return texts


def method_names(record: Record) -> str:
    """Return the text of the method without its options."""
    return re.sub(r"\([^()]*\)", "", record.manifest["experiment"]["method"])


def confused(group: Family) -> Counts | None:
    """Return the sum of the confusion matrices of a family; None if no record has one."""
    known = [record.confusion for record in group if record.confusion is not None]
    if not known:
        return None
    total = np.sum([matrix.counts for matrix in known], axis=0)
    return Counts(known[0].classes, total.tolist())


# --- other tables


def drawing(held: "Indices", classes: Sequence[str], width: int) -> Table:
    """Return a table of clients and classes with the numbers of examples, in shades if the numbers
    are wider than `width`.
    """
    numbers = [[str(count) if count else "·" for count in row] for row in held]
    widths = [max(map(len, column)) for column in zip(classes, *numbers, strict=True)]
    fits = len("client examples ") + sum(widths) + len(widths) <= width
    short_names = max(map(len, classes)) == 1
    headings = classes if fits else ["".join(classes) if short_names else "classes"]
    drawn = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    for heading in ("client", "examples", *headings):
        drawn.add_column(heading, justify="right" if fits else "left", overflow="fold")
    most = held.max()
    for client, row in enumerate(held):
        shades = ["·▁▂▃▄▅▆▇█"[-(-8 * count // most)] for count in row.tolist()]
        cells = numbers[client] if fits else ["".join(shades)]
        drawn.add_row(str(client), str(row.sum()), *cells)
    if not fits:
        drawn.caption = f"one sign for each class, in order; █ is {most} examples, · none"
    return drawn


def paired_cells(test: Paired, digits: int = 2) -> list[str]:
    """Return the cells of a paired test: difference, its interval, the number of seeds in which it
    is positive, and two p values.
    """
    gap = test.difference
    interval = "-" if gap.low is None else f"{gap.low:+.{digits}f} to {gap.high:+.{digits}f}"
    chances = ["-" if p is None else f"{p:.2g}" for p in (test.t_p, test.wilcoxon_p)]
    return [f"{gap.mean:+.{digits}f}", interval, f"{test.wins} of {gap.n}", *chances]
