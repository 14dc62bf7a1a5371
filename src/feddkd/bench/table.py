"""Writes measurements as a table for the screen and as a document for files."""

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from feddkd.bench.measure import PLAIN, Entry
from feddkd.bench.setting import BenchSetting
from feddkd.version import __version__, commit


def document(entries: Sequence[Entry], setting: BenchSetting, *, small: bool) -> dict[str, Any]:
    """Return the measurements with the versions, the commit and the machine, for a JSON file."""
    head, changed = commit() or (None, None)
    return {
        "jobs": list(entries),
        "feddkd": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": head,
        "changed": changed,
        "device": setting.device_name,
        "threads": torch.get_num_threads(),
        "precision": setting.precision,
        "repeats": setting.repeats,
        "small": small,
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def page(entries: Sequence[Entry], setting: BenchSetting) -> Table:
    """Return a table with one row for each job; it fits into 100 columns."""
    table = Table(
        title=f"{setting.engine}, {setting.precision}, {setting.device_name}",
        caption=(
            "median and range of the repeats; loop: one client after another in plain PyTorch, in"
            " the same run; peak: of a large matrix product"
        ),
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    chosen = any("auto_over_best" in entry for entry in entries)
    last = ("compared", "auto/best") if chosen else ("compared",)
    for name in ("job", "time", "plain loop", "ratio", "images/s", "TFLOP/s\nof peak", *last):
        table.add_column(name, justify="left" if name in ("job", *last) else "right", no_wrap=True)
    for entry in entries:
        table.add_row(
            "\n".join(filter(None, [entry["job"], entry["strategy"]])),
            _time(entry["seconds"], entry["seconds_range"], entry["unit"]),
            _time(entry["loop_seconds"], entry["loop_seconds_range"], entry["unit"]),
            f"{entry['ratio']:.3g}",
            f"{entry['images_per_second']:,.0f}",
            f"{entry['tflops']:.3g}\n{entry['peak_share']:.1%}",
            (
                f"{entry['figure']:.3g}\n{entry['figure_of']}"
                if entry["figure_of"] not in PLAIN
                else ""
            ),
            *([_alone(entry)] if chosen else []),
        )
    return table


def _alone(entry: Entry) -> str:
    """Return the cost of choosing, then the milliseconds of each strategy, the fastest first."""
    strategies = sorted(entry.get("strategy_seconds", {}).items(), key=lambda item: item[1])
    lines = [f"{entry.get('auto_over_best', float('nan')):.3f}"]
    lines += [f"{name} {1000 * seconds:.3g}" for name, seconds in strategies]
    return "\n".join(lines)


def _time(median: float, spread: Sequence[float], unit: str) -> str:
    scale, name = (1000, "ms") if median < 1 else (1, "s")
    low, high = (f"{scale * seconds:.3g}" for seconds in spread)
    return f"{scale * median:.3g} {name}/{unit}\n{low}-{high}"
