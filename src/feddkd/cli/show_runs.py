"""Show runs while they are played: progress on standard error, loggers, and a table at the end."""

import json
import logging
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from feddkd.cli.console import console
from feddkd.cli.progress import Bars, title
from feddkd.engines.select import find_device
from feddkd.errors import RunError
from feddkd.experiment import Experiment
from feddkd.reports.tables import table
from feddkd.runs.loggers import RunLoggers, check_loggers
from feddkd.runs.record import Record, folder_name, survey
from feddkd.runs.session import Event, RoundPlayed, RunBegun, RunEnded
from feddkd.runs.summary import metric_keys

IN_JSON = (
    "digest", "method", "seed", "rounds", "test_accuracy", "best_round", "final_test_accuracy",
    "communications", "local_steps", "bytes_up", "bytes_down", "epsilon", "delta", "seconds",
    "selection", "to_target", "ended",
)  # fmt: skip


def show(
    events: Generator[Event],
    experiments: list[Experiment],
    places: list[Path],
    *,
    as_json: bool,
    device: str = "cpu",
    log: Sequence[str] = (),
    until: int | None = None,
    lines: logging.Handler | None = None,
) -> None:
    """Show events while they happen, and the results of all runs at the end. `lines` takes what the
    package logs; by default it is printed on standard error.

    Raise a RunError if a run could not go on.
    """
    check_loggers(log)
    loggers = [RunLoggers(log, *pair) for pair in zip(experiments, places, strict=True)]
    ended: dict[int, dict[str, Any]] = {}
    level = logging.WARNING if as_json else logging.INFO
    with (
        _library_logged(lines or _Lines(), level),
        Bars(experiments, find_device(device), until) as bars,
        closing(events),
    ):
        try:
            for event in events:
                match event:
                    case RunBegun(at, sizes):
                        bars.begin(at, sizes)
                    case RoundPlayed(at, row):
                        bars.row(at, row)
                        loggers[at].row(row)
                    case RunEnded(at, summary):
                        ended[at] = summary
                        loggers[at].close()
        finally:
            for run_loggers in loggers:
                run_loggers.close()
    _show_results(experiments, places, [ended[at] for at in range(len(experiments))], as_json)


def _show_results(
    experiments: list[Experiment],
    places: list[Path],
    summaries: Sequence[dict[str, Any]],
    as_json: bool,
) -> None:
    """Print the table of the runs, and their summaries as JSON; raise a RunError if one ended."""
    records: list[Record] = []
    for experiment, place in zip(experiments, places, strict=True):
        records += survey(place / folder_name(experiment), begun=True).records
    if played := [record for record in records if record.history]:
        console(stderr=as_json).print(table(played))
    if as_json:
        runs = [
            {key: summary.get(key) for key in dict.fromkeys((*IN_JSON, *metric_keys(summary)))}
            for summary in summaries
        ]
        print(json.dumps({"runs": runs}))
    failed = []
    for experiment, summary in zip(experiments, summaries, strict=True):
        if "ended" in summary:
            failed.append(f"{title(experiment)}: {summary['ended']}")
    if failed:
        reasons = "; ".join(failed)
        raise RunError(f"{len(failed)} of {len(experiments)} runs could not go on: {reasons}")


class _Lines(logging.Handler):
    """Prints the log of the library on standard error, one line for each message."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # a place that is full or closed ends no run
            print(record.getMessage(), file=sys.stderr)


@contextmanager
def _library_logged(lines: logging.Handler, level: int) -> Iterator[None]:
    """Give a handler what the package logs at this level and above."""
    library = logging.getLogger("feddkd")
    lines.setLevel(level)
    before = library.level
    library.addHandler(lines)
    library.setLevel(level)
    try:
        yield
    finally:
        library.removeHandler(lines)
        library.setLevel(before)
