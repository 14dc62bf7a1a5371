"""Experiments -> runs on disk. What is finished is left alone, what was cut short goes on."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from feddkd.experiment import Experiment
from feddkd.record import finished_summary, folder_name
from feddkd.rounds import Row
from feddkd.session import OFTEN, Every, Session, abreast
from feddkd.simulation import find_device, find_engine


def execute(
    experiments: Sequence[Experiment],
    *,
    out: Path,
    folder: Path | None = None,
    engine: str = "auto",
    device: str = "cpu",
    options: Mapping[str, Any] | None = None,
    on_row: Callable[[int, Row], None] = lambda index, row: None,
    every: Every = OFTEN,
    fresh: bool = False,
) -> list[dict[str, Any]]:
    """Run experiments that differ in their seed alone, in lock-step; write their folders under `out`, return their summaries.

    Finished runs are left as they are, and those that were cut short go on, unless `fresh`.
    """
    place = find_device(device)  # complain before anything is written
    if engine != "auto":
        find_engine(engine)
    folders = [out / folder_name(experiment) for experiment in experiments]
    done = (
        {} if fresh else {at: summary for at, e in enumerate(experiments) if (summary := finished_summary(folders[at], e.digest))}
    )
    todo = [at for at in range(len(experiments)) if at not in done]
    for group in abreast([folders[at] for at in todo], [experiments[at].digest for at in todo], place, fresh):
        numbers = [todo[n] for n in group.members]
        session = Session([experiments[at] for at in numbers], [folders[at] for at in numbers], group.snapshots, every)
        told = _renumbered(on_row, numbers)
        done |= dict(zip(numbers, session.run(folder, engine, device, options, told), strict=True))
    return [done[at] for at in range(len(experiments))]


def _renumbered(on_row: Callable[[int, Row], None], numbers: Sequence[int]) -> Callable[[int, Row], None]:
    return lambda index, row: on_row(numbers[index], row)


def lock_step(experiments: Sequence[Experiment]) -> list[list[int]]:
    """Positions of experiments that can run as one program: the same but for the seed."""
    families: dict[str, list[int]] = {}
    for at, experiment in enumerate(experiments):
        families.setdefault(experiment.family, []).append(at)
    return list(families.values())
