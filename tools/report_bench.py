"""Measure the page of many long runs: its size, the time to write and to open it.

`make report-bench` runs this script.

90 runs of 660 rounds, made up (18 methods, 5 seeds, 20 clients), with everything recorded that can
be. Opening is measured in browsers that are running already, from the address to the first chart,
which fills the screen, and to the last.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from browser import MISSING, chromium, found
from feddkd.reports.html.page import write
from feddkd.runs.record import find
from made_up import make


def opened(page: Path, times: int = 3) -> dict[str, float]:
    """Seconds, the median of some new browsers: to the first chart, and until all are drawn."""
    first, last = [], []
    for _ in range(times):
        with chromium() as browser:
            browser.look().open_blank()
            browser.open(page)
            marks = browser.run(
                "return ['first', 'all'].map((name) =>"
                " performance.getEntriesByName(name)[0].startTime)"
            )
            first.append(marks[0] / 1000)
            last.append(marks[1] / 1000)
    return {
        "first_chart_seconds": round(median(first), 2),
        "all_charts_seconds": round(median(last), 2),
    }


def measure(methods: int = 18, seeds: int = 5, rounds: int = 660) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        runs, page = Path(folder) / "runs", Path(folder) / "report.html"
        make(runs, methods, seeds, rounds)
        began = time.perf_counter()
        records = find(runs)
        read = time.perf_counter()
        write(records, page)
        done = time.perf_counter()
        told = {
            "runs": len(records),
            "rounds": rounds,
            "megabytes": round(page.stat().st_size / 1e6, 2),
        }
        told |= {"read_seconds": round(read - began, 2), "write_seconds": round(done - read, 2)}
        return told | (opened(page) if found() else {})


if __name__ == "__main__":
    if not found():
        print(MISSING, file=sys.stderr)
    print(json.dumps(measure()))
