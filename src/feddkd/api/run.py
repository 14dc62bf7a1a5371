"""`run`: experiments from Python, with records."""

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from feddkd.api.progress import RoundBars
from feddkd.api.records import LoadedRuns, load_folders
from feddkd.errors import InputError, RunError
from feddkd.experiment import Experiment
from feddkd.experiment import load as load_experiments
from feddkd.rounds.remarks import remark
from feddkd.runs.record import folder_name
from feddkd.runs.runner import How, play_all
from feddkd.runs.session import Every, RoundPlayed, RunEnded
from feddkd.runs.signals import Halted

What = Experiment | str | Path


def run(
    experiments: What | Sequence[What],
    out: str | Path = "runs",
    *,
    engine: str = "auto",
    device: str = "cpu",
    options: Mapping[str, Any] | None = None,
    data: str | Path | None = None,
    every_rounds: int | None = None,
    every_minutes: float = 1.0,
    fresh: bool = False,
    until: int | None = None,
    progress: bool | None = None,
) -> LoadedRuns:
    """Run experiments with records, as `feddkd run` does, and return the runs as `load` does.

    Finished runs under `out` are left alone, and unfinished runs are continued. The
    returned runs are in the order of the experiments. If a run cannot go on, the others are played
    to their end and then a RunError names it. Ctrl-C ends the round, saves, and raises
    KeyboardInterrupt.

    Args:
        experiments: An Experiment, the path of a TOML file with its sweep, or a list of these.
        out: The folder under which each run has its own folder.
        engine: "auto", "serial", "batched" or "pool".
        device: "cpu", "cuda", "cuda:1", ...
        options: Options of a named engine, as in {"precision": "bf16"} for "batched".
        data: Folder with the official data files; FEDDKD_DATA by default.
        every_rounds: The number of rounds between checkpoints; by default they follow the time.
        every_minutes: The minutes between checkpoints.
        fresh: Run again what is finished or was cut short.
        until: Stop after this round, with a checkpoint, to continue another time.
        progress: Show progress bars on standard error; by default if that is a terminal.
    """
    chosen, folder = _experiments(experiments), _data_folder(data)
    every = Every(every_rounds, every_minutes)
    how = How(engine, device, dict(options or {}), folder, every, fresh, until)
    folders = [Path(out) / folder_name(experiment) for experiment in chosen]
    titles = [(path.name, one.length(until)) for path, one in zip(folders, chosen, strict=True)]
    failed = {}
    events = play_all(chosen, [Path(out)] * len(chosen), how)
    with RoundBars(titles, progress) as bars, closing(events):
        try:
            for event in events:
                if isinstance(event, RoundPlayed):
                    bars.row(event.at, event.row)
                elif isinstance(event, RunEnded) and "ended" in event.summary:
                    failed[event.at] = event.summary["ended"]
        except Halted as halted:
            raise KeyboardInterrupt(str(halted)) from None
    if failed:
        reasons = "; ".join(f"{folders[at].name}: {why}" for at, why in failed.items())
        raise RunError(f"{len(failed)} of {len(chosen)} runs could not go on: {reasons}")
    return load_folders(folders)


def _experiments(given: Any) -> list[Experiment]:
    """Return the experiments of a value, of a file, or of a list of these."""
    if isinstance(given, Experiment):
        remark([(given.parsed_method, given.cohort, given.clients)])
        return [given]
    if isinstance(given, str | Path):
        return load_experiments(Path(given))
    if not isinstance(given, Sequence) or not given:
        raise InputError(
            "experiments must be an Experiment, the path of a TOML file, or a list of these, not"
            f" {given!r}"
        )
    return [experiment for item in given for experiment in _experiments(item)]


def _data_folder(given: str | Path | None) -> Path | None:
    folder = os.environ.get("FEDDKD_DATA") if given is None else given
    return Path(folder) if folder else None
