"""feddkd ls: the runs under a folder, one line for each run."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from feddkd.cli.console import AsJson, console, plain_table, skipped
from feddkd.errors import InputError, unknown
from feddkd.reports.families import method_names
from feddkd.rounds.metrics import ACCURACY, headline, known
from feddkd.runs.record import Record, survey
from feddkd.runs.summary import summarise

Entry = dict[str, Any]
NUMBERS = ("seed", "rounds", "best", "last", "seconds", "started")
COLUMNS = ("run", "method", "data", "seed", "rounds", "best", "last", "seconds", "started")


def listing(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of runs.")] = Path("runs"),
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=TEXT",
            help="Only runs whose key contains the text, as in method=dkd, seed=0, state=running.",
        ),
    ] = None,
    sort: Annotated[
        str,
        typer.Option(
            metavar="COLUMN", help="The column to sort by; numbers start with the highest."
        ),
    ] = "run",
    as_json: AsJson = False,
) -> None:
    """List the runs under a folder, one line for each run: method, data, seed, rounds played, best
    and last test accuracy in %, and time.
    """
    if sort not in COLUMNS:
        raise unknown(f"runs cannot be sorted by {sort!r}", sort, COLUMNS)
    found, errors = survey(folder, begun=True)
    conditions = [_condition(text, found) for text in where or ()]
    kept = [record for record in found if all(holds(record) for holds in conditions)]
    entries = sorted((_entry(record) for record in kept), key=lambda entry: _rank(entry[sort]))
    console(stderr=as_json).print(_table(entries), f"{len(kept)} of {len(found)} runs")
    if as_json:
        print(json.dumps({"runs": entries}))
    skipped(errors)


def _entry(record: Record) -> Entry:
    manifest, numbers = record.manifest, summarise(record.history) if record.history else {}
    metric = headline(record.history or [{}])
    return {
        "run": record.folder.name,
        "method": manifest["experiment"].get("name") or method_names(record),
        "data": manifest["experiment"]["data"],
        "seed": manifest["canonical"]["seed"],
        "rounds": len(record.history),
        "of": manifest["canonical"]["rounds"],
        "state": _state(record),
        "metric": metric.name,
        "best": numbers.get(metric.test_key),
        "last": numbers.get(f"final_{metric.test_key}"),
        "seconds": round(record.seconds, 1),
        "started": manifest.get("started", ""),
        "folder": str(record.folder),
        "digest": manifest["digest"],
    }


def _state(record: Record) -> str:
    """Return the state of a run.

    running: a process writes there, or was killed while it did; ended: it could not go on;
    stopped: `on_round` ended it; halted: it can be continued.
    """
    if record.finished:
        return "finished"
    if (record.folder / "lock").exists():
        return "running"
    for state in ("ended", "stopped"):
        if state in record.manifest:
            return state
    return "halted"


def _condition(text: str, records: Sequence[Record]) -> Callable[[Record], bool]:
    """Return the test of a record that a text KEY=TEXT stands for."""
    key, equals, wanted = text.partition("=")
    if not equals:
        raise InputError(f"--where is written KEY=TEXT, as in method=dkd, not {text!r}")
    if not _is_key(key, records):
        raise unknown(f"runs have no key {key!r}", key, _keys())

    def holds(record: Record) -> bool:
        if key in ("state", "run"):
            return wanted in _entry(record)[key]
        value = record.manifest["experiment"].get(key, record.manifest["canonical"].get(key, ""))
        return wanted in value if isinstance(value, str) else wanted == str(value)

    return holds


def _is_key(key: str, records: Sequence[Record]) -> bool:
    if key in ("state", "run") or any(key in one.manifest["experiment"] for one in records):
        return True
    return key in _keys()


def _keys() -> tuple[str, ...]:
    from feddkd.experiment import KEYS  # loads torch

    return (*KEYS, "state", "run")


def _rank(value: Any) -> tuple[int, Any]:
    """Return a sort key: texts in order, numbers from the highest down, unknown values last."""
    return (1, "") if value is None else (0, value if isinstance(value, str) else -value)


def _table(entries: Sequence[Entry]) -> Table:
    texts = ("run", "method", "data", "started")
    page = plain_table(*COLUMNS, left=[COLUMNS.index(name) for name in texts])
    for entry in entries:
        metric, values = known(entry["metric"]) or ACCURACY, (entry["best"], entry["last"])
        shares = [
            "-" if value is None else f"{metric.scale * value:.{metric.digits}f}"
            for value in values
        ]
        rounds = f"{entry['rounds']}/{entry['of']}"
        facts = (entry["run"], entry["method"], entry["data"], str(entry["seed"]), rounds)
        page.add_row(
            *facts, *shares, f"{entry['seconds']:.0f}", entry["started"][5:16].replace("T", " ")
        )
    return page
