"""Records -> tables: one line a method, mean and population standard deviation over its seeds."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from feddkd.reports.statistics import Paired
from feddkd.runs.record import Counts, Record
from feddkd.runs.summary import mean_and_std, summarise, to_target

if TYPE_CHECKING:  # tables of records take no torch
    from feddkd.data.batches import Indices


def table(records: Sequence[Record]) -> Table:
    """Accuracy by protocol, the gain of the last phases over the plain average, and what the target
    cost.
    """
    page = Table(title="Test accuracy in %", box=SIMPLE_HEAD, padding=0, show_edge=False)
    page.caption, page.caption_justify = "\n".join(caption(records)), "left"
    (method, *headings), lines = grid(records)
    page.add_column(method, overflow="fold", min_width=13)
    for heading in headings:
        page.add_column(heading, justify="right", no_wrap=True)
    for line in lines:
        page.add_row(*line)
    return page


def grid(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """The table's headings and lines."""
    target, groups = target_of(records), families(records)
    more = ["n"] if target is None else ["hit", "rounds", "comms", "steps", "MB"]
    lines = [
        [label, *_cells(group, target)] for label, group in zip(labels(groups), groups, strict=True)
    ]
    headings = ["method", "best", "last", "average", *more]
    if not any("epsilon" in record.history[-1] for record in records):
        return headings, lines
    return [*headings, "epsilon"], [
        [*line, _epsilon(group)] for line, group in zip(lines, groups, strict=True)
    ]


def as_json(records: Sequence[Record]) -> dict[str, Any]:
    """The table's numbers: shares, not percents."""
    target, groups = target_of(records), families(records)
    lines = [
        {
            "method": label,
            "family": group[0].manifest["family"],
            "seeds": [r.manifest["canonical"]["seed"] for r in group],
            "test_accuracy": {name: told(values) for name, values in accuracies(group).items()},
            "to_target": (
                None
                if target is None
                else {name: told(values) for name, values in prices(group, target).items()}
            ),
        }
        for label, group in zip(labels(groups), groups, strict=True)
    ]
    return {"target": target, "methods": lines}


def target_of(records: Sequence[Record]) -> float | None:
    """The accuracy whose price is told: that of the first run that names one."""
    return next(
        (
            r.manifest["experiment"]["target"]
            for r in records
            if "target" in r.manifest["experiment"]
        ),
        None,
    )


def families(records: Sequence[Record]) -> list[list[Record]]:
    """Records that differ in their seeds alone, together: what is averaged."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record.manifest["family"], []).append(record)
    return list(found.values())


def drawing(held: "Indices", classes: Sequence[str], width: int) -> Table:
    """Clients x classes: how many examples of each class each client holds; in shades, where the
    numbers are too wide.
    """
    numbers = [[str(count) if count else "·" for count in row] for row in held]
    needed = [max(map(len, column)) for column in zip(classes, *numbers, strict=True)]
    shades = [
        "".join("·▁▂▃▄▅▆▇█"[-(-8 * count // held.max())] for count in row) for row in held.tolist()
    ]
    page = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    fits = len("client examples ") + sum(needed) + len(needed) <= width
    signs = "".join(classes) if max(map(len, classes)) == 1 else "classes"
    for heading in ("client", "examples", *(classes if fits else [signs])):
        page.add_column(heading, justify="right" if fits else "left", overflow="fold")
    for client, row in enumerate(held):
        page.add_row(str(client), str(row.sum()), *(numbers[client] if fits else [shades[client]]))
    if not fits:
        page.caption = (
            f"one sign a class, in the order of its number; █ is {held.max()} examples, · none"
        )
    return page


def confused(group: Sequence[Record]) -> Counts | None:
    """The confusion matrices of a family's final models together; None where no record has one."""
    known = [record.confusion for record in group if record.confusion is not None]
    return (
        Counts(known[0].classes, np.sum([one.counts for one in known], axis=0).tolist())
        if known
        else None
    )


def labels(groups: list[list[Record]]) -> list[str]:
    """A name of the user's, or the method by its names alone; with more, where that would not tell
    two lines apart.
    """
    manifests = [group[0].manifest for group in groups]
    keys = dict.fromkeys(
        key
        for m in manifests
        for key in m["canonical"]
        if key not in ("method", "seed", "split_seed")
    )
    told = [
        key for key in keys if len({manifest["canonical"].get(key) for manifest in manifests}) > 1
    ]
    more = [
        "".join(f", {key} {m['experiment'].get(key, m['canonical'].get(key))}" for key in told)
        for m in manifests
    ]
    whole = [group[0].label for group in groups]
    short = [
        group[0].manifest["experiment"].get("name") or method_names(group[0]) for group in groups
    ]
    tries = (
        short,
        [a + b for a, b in zip(short, more, strict=True)],
        whole,
        [a + b for a, b in zip(whole, more, strict=True)],
    )
    return [
        next((t[at] for t in tries if t.count(t[at]) == 1), whole[at]) for at in range(len(groups))
    ]


def method_names(record: Record) -> str:
    """The method without its options."""
    return re.sub(r"\([^()]*\)", "", record.manifest["experiment"]["method"])


def caption(records: Sequence[Record]) -> list[str]:
    """What the columns mean; no number without its protocol."""
    target = target_of(records)
    protocols = sorted({record.manifest["protocol"]["test_accuracy"] for record in records})
    selections = sorted({summarise(record.history)["selection"] for record in records})
    lines = [
        f"accuracy of {'; or of '.join(protocols)}; mean ± population std over n seeds",
        (
            f"best: at the {' or '.join(selections)}; last: at the end; average: before DKD in the"
            " last round"
        ),
    ]
    if deltas := sorted(
        {record.history[-1]["delta"] for record in records if "delta" in record.history[-1]}
    ):
        lines.append(
            "epsilon: differential privacy of clients at the end, at delta"
            f" {' or '.join(f'{d:.3g}' for d in deltas)}"
        )
    if target is not None:
        lines.append(
            f"hit: seeds that reached {100 * target:g} %, and what that cost them on average"
        )
    if unfinished := sum(not record.finished for record in records):
        lines.append(f"unfinished, and taken as they stand: {unfinished} of {len(records)} runs")
    return lines


def accuracies(group: Sequence[Record]) -> dict[str, list[float]]:
    """Seed by seed: at the best validation round, at the end, and at the end before DKD, where that
    is something else.
    """
    summaries, ends = (
        [summarise(record.history) for record in group],
        [record.history[-1] for record in group],
    )
    return {
        "best": [summary["test_accuracy"] for summary in summaries],
        "last": [summary["final_test_accuracy"] for summary in summaries],
        "average": [row["average_test_accuracy"] for row in ends if "average_test_accuracy" in row],
    }


def _epsilon(group: Sequence[Record]) -> str:
    """The same for all seeds; JSON has no infinity, so it stands there as null."""
    last = group[0].history[-1]
    return (
        "-"
        if "epsilon" not in last
        else "infinite"
        if last["epsilon"] is None
        else f"{last['epsilon']:.2f}"
    )


def prices(group: Sequence[Record], target: float) -> dict[str, list[float]]:
    """What the target cost the seeds that reached it."""
    reached = [cost for record in group if (cost := to_target(record.history, target))]
    return {
        "rounds": [cost["round"] for cost in reached],
        "comms": [cost["communications"] for cost in reached],
        "steps": [cost["local_steps"] for cost in reached],
        "MB": [(cost["bytes_up"] + cost["bytes_down"]) / 1e6 for cost in reached],
    }


def _cells(group: Sequence[Record], target: float | None) -> list[str]:
    found = [percent(values) if values else "-" for values in accuracies(group).values()]
    if target is None:
        return [*found, str(len(group))]
    price = prices(group, target)
    means = [_short(mean_and_std(values)[0]) if values else "-" for values in price.values()]
    return [*found, f"{len(price['rounds'])}/{len(group)}", *means]


def paired_cells(test: Paired) -> list[str]:
    """A difference in points, its interval, the seeds in which it is one, and how likely it is by
    chance.
    """
    gap = test.difference
    interval = "-" if gap.low is None else f"{gap.low:+.2f} to {gap.high:+.2f}"
    chances = ["-" if p is None else f"{p:.2g}" for p in (test.t_p, test.wilcoxon_p)]
    return [f"{gap.mean:+.2f}", interval, f"{test.wins} of {gap.n}", *chances]


def told(values: list[float]) -> dict[str, float] | None:
    """For JSON."""
    return (
        {"n": len(values), **dict(zip(("mean", "std"), mean_and_std(values), strict=True))}
        if values
        else None
    )


def _short(value: float) -> str:
    return f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def percent(values: list[float]) -> str:
    """For people."""
    mean, deviation = mean_and_std(values)
    return f"{100 * mean:.2f}±{100 * deviation:.2f}"
