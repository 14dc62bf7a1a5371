"""Records -> tables: one line a method, mean and population standard deviation over its seeds."""

import re
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from feddkd.record import Record
from feddkd.summary import mean_and_std, summarise, to_target


def table(records: Sequence[Record]) -> Table:
    """Accuracy by protocol, the gain of the last phases over the plain average, and what the target cost."""
    target = next((r.manifest["experiment"]["target"] for r in records if "target" in r.manifest["experiment"]), None)
    families: dict[str, list[Record]] = {}
    for record in records:
        families.setdefault(record.manifest["family"], []).append(record)
    page = Table(title="Test accuracy in %", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    page.caption, page.caption_justify = _caption(records, target), "left"
    page.add_column("method", overflow="fold", min_width=13)
    for heading in ("best", "last", "average", *(("n",) if target is None else ("hit", "rounds", "comms", "steps", "MB"))):
        page.add_column(heading, justify="right", no_wrap=True)
    for label, group in zip(_labels(list(families.values())), families.values(), strict=True):
        page.add_row(label, *_accuracies(group), *([str(len(group))] if target is None else _price(group, target)))
    return page


def _labels(groups: list[list[Record]]) -> list[str]:
    """A name of the user's, or the method by its names alone; whole, where these would not tell two lines apart."""
    whole = [group[0].label for group in groups]
    short = [re.sub(r"\([^()]*\)", "", label) for label in whole]
    return [short[at] if short.count(short[at]) == 1 else whole[at] for at in range(len(groups))]


def _caption(records: Sequence[Record], target: float | None) -> str:
    """What the columns mean; no number without its protocol."""
    protocols = sorted({record.manifest["protocol"]["test_accuracy"] for record in records})
    selections = sorted({summarise(record.history)["selection"] for record in records})
    lines = [
        f"accuracy of {'; or of '.join(protocols)}; mean ± population std over n seeds",
        f"best: at the {' or '.join(selections)}; last: at the end; average: before DKD in the last round",
    ]
    if target is not None:
        lines.append(f"hit: seeds that reached {100 * target:g} %, and what that cost them on average")
    return "\n".join(lines)


def _accuracies(group: list[Record]) -> list[str]:
    summaries = [summarise(record.history) for record in group]
    averages = [record.history[-1]["average_test_accuracy"] for record in group if "average_test_accuracy" in record.history[-1]]
    return [
        _percent([summary["test_accuracy"] for summary in summaries]),
        _percent([summary["final_test_accuracy"] for summary in summaries]),
        _percent(averages) if averages else "-",
    ]


def _price(group: list[Record], target: float) -> list[str]:
    """What the target cost, on average over the seeds that reached it."""
    reached = [cost for record in group if (cost := to_target(record.history, target))]
    megabytes = [(cost["bytes_up"] + cost["bytes_down"]) / 1e6 for cost in reached]
    costs = [[cost[name] for cost in reached] for name in ("round", "communications", "local_steps")]
    means = [f"{mean_and_std(values)[0]:.4g}" if values else "-" for values in (*costs, megabytes)]
    return [f"{len(reached)}/{len(group)}", *means]


def _percent(values: list[float]) -> str:
    mean, deviation = mean_and_std(values)
    return f"{100 * mean:.2f}±{100 * deviation:.2f}"
