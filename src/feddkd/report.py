"""Records -> tables: one line a method, mean and population standard deviation over its seeds."""

import re
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from feddkd.data.batches import Indices
from feddkd.record import Record
from feddkd.summary import mean_and_std, summarise, to_target


def table(records: Sequence[Record]) -> Table:
    """Accuracy by protocol, the gain of the last phases over the plain average, and what the target cost."""
    target = next((r.manifest["experiment"]["target"] for r in records if "target" in r.manifest["experiment"]), None)
    groups = families(records)
    page = Table(title="Test accuracy in %", box=SIMPLE_HEAD, padding=0, show_edge=False)
    page.caption, page.caption_justify = _caption(records, target), "left"
    private = any("epsilon" in record.history[-1] for record in records)
    page.add_column("method", overflow="fold", min_width=13)
    price = ["n"] if target is None else ["hit", "rounds", "comms", "steps", "MB"]
    for heading in ["best", "last", "average", *(["epsilon"] if private else []), *price]:
        page.add_column(heading, justify="right", no_wrap=True)
    for label, group in zip(labels(groups), groups, strict=True):
        spent = [_epsilon(group)] if private else []
        page.add_row(label, *_accuracies(group), *spent, *([str(len(group))] if target is None else _price(group, target)))
    return page


def families(records: Sequence[Record]) -> list[list[Record]]:
    """Records that differ in their seeds alone, together: what is averaged."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record.manifest["family"], []).append(record)
    return list(found.values())


def drawing(held: Indices, classes: Sequence[str], width: int) -> Table:
    """Clients x classes: how many examples of each class each client holds; in shades, where the numbers are too wide."""
    numbers = [[str(count) if count else "·" for count in row] for row in held]
    needed = [max(map(len, column)) for column in zip(classes, *numbers, strict=True)]
    shades = ["".join("·▁▂▃▄▅▆▇█"[-(-8 * count // held.max())] for count in row) for row in held.tolist()]
    page = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    fits = len("client examples ") + sum(needed) + len(needed) <= width
    signs = "".join(classes) if max(map(len, classes)) == 1 else "classes"
    for heading in ("client", "examples", *(classes if fits else [signs])):
        page.add_column(heading, justify="right" if fits else "left", overflow="fold")
    for client, row in enumerate(held):
        page.add_row(str(client), str(row.sum()), *(numbers[client] if fits else [shades[client]]))
    if not fits:
        page.caption = f"one sign a class, in the order of its number; █ is {held.max()} examples, · none"
    return page


def labels(groups: list[list[Record]]) -> list[str]:
    """A name of the user's, or the method by its names alone; with more, where that would not tell two lines apart."""
    manifests = [group[0].manifest for group in groups]
    keys = dict.fromkeys(key for m in manifests for key in m["canonical"] if key not in ("method", "seed", "split_seed"))
    told = [key for key in keys if len({manifest["canonical"].get(key) for manifest in manifests}) > 1]
    more = ["".join(f", {key} {m['experiment'].get(key, m['canonical'].get(key))}" for key in told) for m in manifests]
    whole = [group[0].label for group in groups]
    short = [m["experiment"].get("name") or re.sub(r"\([^()]*\)", "", m["experiment"]["method"]) for m in manifests]
    tries = short, [a + b for a, b in zip(short, more, strict=True)], whole, [a + b for a, b in zip(whole, more, strict=True)]
    return [next((t[at] for t in tries if t.count(t[at]) == 1), whole[at]) for at in range(len(groups))]


def _caption(records: Sequence[Record], target: float | None) -> str:
    """What the columns mean; no number without its protocol."""
    protocols = sorted({record.manifest["protocol"]["test_accuracy"] for record in records})
    selections = sorted({summarise(record.history)["selection"] for record in records})
    lines = [
        f"accuracy of {'; or of '.join(protocols)}; mean ± population std over n seeds",
        f"best: at the {' or '.join(selections)}; last: at the end; average: before DKD in the last round",
    ]
    if deltas := sorted({record.history[-1]["delta"] for record in records if "delta" in record.history[-1]}):
        lines.append(f"epsilon: differential privacy of clients at the end, at delta {' or '.join(f'{d:.3g}' for d in deltas)}")
    if target is not None:
        lines.append(f"hit: seeds that reached {100 * target:g} %, and what that cost them on average")
    if unfinished := sum(not record.finished for record in records):
        lines.append(f"unfinished, and taken as they stand: {unfinished} of {len(records)} runs")
    return "\n".join(lines)


def _accuracies(group: list[Record]) -> list[str]:
    summaries = [summarise(record.history) for record in group]
    averages = [record.history[-1]["average_test_accuracy"] for record in group if "average_test_accuracy" in record.history[-1]]
    return [
        _percent([summary["test_accuracy"] for summary in summaries]),
        _percent([summary["final_test_accuracy"] for summary in summaries]),
        _percent(averages) if averages else "-",
    ]


def _epsilon(group: list[Record]) -> str:
    """The same for all seeds; JSON has no infinity, so it stands there as null."""
    last = group[0].history[-1]
    return "-" if "epsilon" not in last else "infinite" if last["epsilon"] is None else f"{last['epsilon']:.2f}"


def _price(group: list[Record], target: float) -> list[str]:
    """What the target cost, on average over the seeds that reached it."""
    reached = [cost for record in group if (cost := to_target(record.history, target))]
    megabytes = [(cost["bytes_up"] + cost["bytes_down"]) / 1e6 for cost in reached]
    costs = [[cost[name] for cost in reached] for name in ("round", "communications", "local_steps")]
    means = [_short(mean_and_std(values)[0]) if values else "-" for values in (*costs, megabytes)]
    return [f"{len(reached)}/{len(group)}", *means]


def _short(value: float) -> str:
    return f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def _percent(values: list[float]) -> str:
    mean, deviation = mean_and_std(values)
    return f"{100 * mean:.2f}±{100 * deviation:.2f}"
