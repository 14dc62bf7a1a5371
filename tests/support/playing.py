"""Runs and jobs played to their end, for tests that look at what happens on the way."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from feddkd import Experiment
from feddkd.data.federation import Federation
from feddkd.methods import parse
from feddkd.models.functional import Model
from feddkd.rounds.loop import Row, Run
from feddkd.runs.runner import How, play
from feddkd.runs.session import RoundPlayed, RunEnded
from feddkd.simulation import Job, Simulation, Start


def execute(
    experiments: Sequence[Experiment], *, out: Path, on_row: Callable[[int, Row], None], **how: Any
) -> list[dict[str, Any]]:
    """Run experiments and call a function after each row; return the summaries."""
    ended = {}
    for event in play(experiments, out, How(**how)):
        if isinstance(event, RoundPlayed):
            on_row(event.at, event.row)
        elif isinstance(event, RunEnded):
            ended[event.at] = event.summary
    return [ended[at] for at in range(len(experiments))]


def job_of(
    model: Model,
    method: str,
    federations: Sequence[Federation],
    starts: Sequence[Any],
    seeds: Sequence[int],
    **more: Any,
) -> Job:
    """Return a job in float64; `starts` are pairs of parameters and buffers."""
    each = [
        Start(seed, own, *start)
        for seed, own, start in zip(seeds, federations, starts, strict=True)
    ]
    return Job(model, parse(method), each, **{"dtype": torch.float64, **more})


def play_job(
    job: Job, engine: str, device: str = "cpu", **options: Any
) -> tuple[list[Run], list[dict[int, Row]]]:
    """Play a job; return its runs and the rows of each round."""
    with Simulation(job, engine, device, options) as simulation:
        rows = list(simulation.rounds())
        return simulation.runs, rows
