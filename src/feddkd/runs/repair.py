"""Checking all files of runs, and repairing what can be repaired.

An unfinished run can go back to a checkpoint and the rows before it; a summary can be made of the
rows; a seal can be written again if it is all that is damaged.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from feddkd.errors import InputError
from feddkd.runs import checkpoint
from feddkd.runs.damage import TEXTS, WEIGHTS, Checked, Flaw, check, complete_lines, contents
from feddkd.runs.files import parsed, put
from feddkd.runs.lock import Lock
from feddkd.runs.record import read_record, run_folders
from feddkd.runs.recorder import in_json
from feddkd.runs.seal import LINES, SEAL, SealWriter, read_seal
from feddkd.runs.summary import summarise


class Remedy(NamedTuple):
    """A way to repair a damaged run."""

    what: str
    repair: Callable[[], None] | None  # None: nothing but to run it again


class CheckedRun(NamedTuple):
    """The result of checking a run."""

    folder: Path
    state: str  # whole, unchecked, damaged
    flaws: list[str]
    remedy: Remedy | None


AGAIN = Remedy("it cannot be repaired; `feddkd run --fresh` runs it again", None)


def check_runs(folder: Path) -> Iterator[CheckedRun]:
    """Check the runs under a folder; raise an InputError if there are none."""
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}")
    runs = run_folders(folder)
    if not runs:
        raise InputError(f"no runs under {folder}")
    yield from map(check_run, runs)


def check_run(folder: Path) -> CheckedRun:
    """Check all files of a run."""
    try:
        checked = check(folder)
        if checked.flaws:
            flaws = list(map(str, checked.flaws))
            return CheckedRun(folder, "damaged", flaws, _remedy(folder, checked))
        if _has_lost_summary(folder):
            return CheckedRun(folder, "damaged", ["summary.json is missing"], _new_summary(folder))
        read_record(folder)
    except InputError as error:
        return CheckedRun(folder, "damaged", [str(error)], AGAIN)
    return CheckedRun(folder, "whole" if checked.sealed else "unchecked", [], None)


def repaired(found: CheckedRun) -> CheckedRun:
    """Repair a run if that is possible, and check it again."""
    if found.remedy is None or found.remedy.repair is None:
        return found
    lock = Lock(found.folder)
    lock.take()
    try:
        found.remedy.repair()
    finally:
        lock.give_back()
    return check_run(found.folder)


def _remedy(folder: Path, checked: Checked) -> Remedy:
    damaged = {flaw.file for flaw in checked.flaws}
    if (folder / "summary.json").exists():
        if damaged == {SEAL} and checked.rounds == _rounds_of(folder):
            return Remedy(f"all else is whole: {SEAL} can be written again", partial(_seal, folder))
        if damaged == {"summary.json"}:
            return _new_summary(folder)
    elif "manifest.json" not in damaged:
        usable = [t for t in checkpoint.rounds(folder) if t <= checked.rounds]
        if usable:
            what = f"the run can go back to its checkpoint of round {usable[-1]}"
            return Remedy(what, partial(_go_back, folder, usable[-1], checked.flaws))
    return AGAIN


def _has_lost_summary(folder: Path) -> bool:
    """Return whether a run that was finished has no summary."""
    seal = read_seal(folder)
    return (
        seal is not None and "summary.json" in seal.files and not (folder / "summary.json").exists()
    )


def _new_summary(folder: Path) -> Remedy:
    what = "the rows are whole: summary.json can be made of them"
    return Remedy(what, partial(_summarise, folder))


def _rounds_of(folder: Path) -> Any:
    """Return the number of rounds in the manifest of a run."""
    return parsed((folder / "manifest.json").read_bytes())["canonical"]["rounds"]


def _seal(folder: Path) -> None:
    """Write the seal again, from all files."""
    found = contents(folder, (*TEXTS, *WEIGHTS))
    rows, timings = (complete_lines(found.pop(name, b"")) for name in LINES)
    seal = SealWriter(folder)
    seal.begin(zip(rows, timings, strict=False), found)
    seal.close()


def _summarise(folder: Path) -> None:
    """Write the summary again, from the rows. The seconds are those of the timings' digits."""
    (folder / "summary.json").unlink(missing_ok=True)
    record = read_record(folder)
    manifest = record.manifest
    facts = {
        "digest": manifest["digest"],
        "method": manifest["experiment"]["method"],
        "seed": manifest["canonical"]["seed"],
        **summarise(record.history, manifest["experiment"].get("target")),
        "seconds": round(record.seconds, 3),
    }
    put(folder / "summary.json", in_json(facts))
    _seal(folder)


def _go_back(folder: Path, round: int, flaws: list[Flaw]) -> None:
    """Remove what came after a checkpoint; the run writes it again when it is continued."""
    for later in checkpoint.rounds(folder):
        if later > round:
            checkpoint.remove_round(folder, later)
    for flaw in flaws:
        if flaw.file not in (*LINES, SEAL):
            (folder / flaw.file).unlink()
    for name in LINES:
        kept = complete_lines((folder / name).read_bytes())[:round]
        os.truncate(folder / name, sum(map(len, kept)))
    _seal(folder)
