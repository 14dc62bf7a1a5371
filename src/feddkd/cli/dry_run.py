"""feddkd run --dry-run: a plan of what would run, with time, memory and bytes."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from feddkd.cli.console import clock, plain_table
from feddkd.engines.memory import in_words
from feddkd.experiment import Experiment
from feddkd.runs import checkpoint
from feddkd.runs.forecast import forecast
from feddkd.runs.record import finished_summary, folder_name
from feddkd.runs.runner import How, lock_step

# a sweep with at least this many rounds in all runs gets a forecast before it starts
LONG = 1000
# the same for steps of a client, on all devices
VAST = 1_000_000


def worth_a_forecast(experiments: Sequence[Experiment], until: int | None, device: str) -> bool:
    """Return whether a sweep gets a forecast before it starts."""
    rounds = sum(experiment.length(until) for experiment in experiments)
    steps = sum(
        phase.repeat.total(1, experiment.length(until)) * (phase.reads.steps or phase.reads.epochs)
        for experiment in experiments
        for phase in experiment.parsed_method.phases
    )
    return steps >= VAST or (device == "cpu" and rounds >= LONG)


def plan(experiments: Sequence[Experiment], places: Sequence[Path], how: How) -> dict[str, Any]:
    """Return what would run, group by group as it runs in lock-step, and what all of it takes."""
    together = lock_step(experiments, places)
    groups = [
        _group([experiments[at] for at in group], places[group[0]], how) for group in together
    ]
    todo = [group for group in groups if group["runs"]]
    return {
        "groups": groups,
        "runs": sum(group["runs"] for group in groups),
        "finished": sum(group["finished"] for group in groups),
        "seconds": sum(group["seconds"] for group in todo),
        "memory": max((group["memory"] or 0 for group in todo), default=0),
        "bytes": sum(group["runs"] * (group["bytes_up"] + group["bytes_down"]) for group in todo),
    }


def _group(experiments: list[Experiment], place: Path, how: How) -> dict[str, Any]:
    todo = [
        e
        for e in experiments
        if how.fresh or finished_summary(place / folder_name(e), e.digest) is None
    ]
    known = {
        "method": experiments[0].name or experiments[0].method,
        "runs": len(todo),
        "finished": len(experiments) - len(todo),
    }
    if not todo:
        return known
    done = (
        0
        if how.fresh
        else min(max(checkpoint.rounds(place / folder_name(e)), default=0) for e in todo)
    )
    return {
        **known,
        "rounds": todo[0].length(how.until) - done,
        **asdict(forecast(todo, how, done)),
    }


def planned(content: dict[str, Any]) -> Table:
    """Return a plan as a table."""
    headings = "method", "runs", "rounds", "engine", "time", "memory", "MB a run"
    page = plain_table(*headings, title="Forecast")
    for group in content["groups"]:
        page.add_row(
            group["method"], *(_cells(group) if group["runs"] else ["finished", *["-"] * 5])
        )
    runs = f"{content['runs']} runs, {content['finished']} finished already"
    traffic = f"{content['bytes'] / 1e6:.4g} MB between server and clients"
    time, memory = clock(content["seconds"]), in_words(content["memory"])
    page.caption = f"{runs}: about {time}, {memory} of memory, {traffic}"
    page.caption_justify = "left"
    return page


def _cells(group: dict[str, Any]) -> list[str]:
    memory = "-" if group["memory"] is None else in_words(group["memory"])
    traffic = f"{(group['bytes_up'] + group['bytes_down']) / 1e6:.4g}"
    return [
        str(group["runs"]),
        str(group["rounds"]),
        group["engine"],
        clock(group["seconds"]),
        memory,
        traffic,
    ]
