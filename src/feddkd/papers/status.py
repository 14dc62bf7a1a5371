"""Counts the finished runs of a paper's tables and estimates the cost of the rest."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from feddkd.experiment import Experiment
from feddkd.papers.definitions import Paper
from feddkd.papers.results import RecordedRun, Runs


@dataclass(frozen=True)
class Progress:
    """The finished and the wanted runs of some experiments.

    `seconds_left` counts the runs whose cost can be estimated from a record; None: there are none.
    """

    name: str
    runs_done: int
    runs_wanted: int
    rounds_done: int
    rounds_wanted: int
    seconds_left: float | None
    runs_of_unknown_cost: int


def progress(paper: Paper, runs: Runs) -> list[Progress]:
    """Return the progress of each table, and of all together: tables share runs."""
    wanted = {
        name: [(experiment, experiment.length(table.most())) for experiment in paper.wanted(table)]
        for name, table in paper.tables.items()
    }
    by_length = sorted(itertools.chain(*wanted.values()), key=lambda item: item[1])
    # an experiment of several tables keeps its largest number of rounds
    together = {experiment.digest: (experiment, rounds) for experiment, rounds in by_length}
    pace = Pace(runs.values())
    parts = [*wanted.items(), ("all", list(together.values()))]
    return [_progress(name, experiments, runs, pace) for name, experiments in parts]


def _progress(
    name: str, wanted: Sequence[tuple[Experiment, int]], runs: Runs, pace: "Pace"
) -> Progress:
    done, left = 0, []
    for experiment, rounds in wanted:
        run = runs.get(experiment.digest)
        finished = 0 if run is None else min(rounds, len(run.rounds))
        done += finished
        if run is None or not run.reaches(rounds):
            left.append((experiment, rounds - finished))
    costs = [(pace.seconds_a_round(experiment), rounds) for experiment, rounds in left]
    known = [cost * rounds for cost, rounds in costs if cost is not None]
    return Progress(
        name,
        len(wanted) - len(left),
        len(wanted),
        done,
        sum(rounds for _, rounds in wanted),
        round(sum(known), 1) if known or not left else None,
        len(left) - len(known),
    )


class Pace:
    """Estimates the seconds of a round from records.

    The estimate is the fastest record of the same methods on the same network, or else of any
    method on it, in proportion to a round's local work. Slower records may have shared the machine.
    The estimate is rough: it ignores the engine and the device.
    """

    def __init__(self, runs: Iterable[RecordedRun]) -> None:
        self._fastest: dict[str, float] = {}  # kind of run -> seconds per unit of local work
        for run in runs:
            if run.rounds:
                pace = run.seconds / len(run.rounds) / _work(run.experiment)
                for kind in _kinds(run.experiment):
                    self._fastest[kind] = min(pace, self._fastest.get(kind, pace))

    def seconds_a_round(self, experiment: Experiment) -> float | None:
        """Return the estimated seconds of a round; None if there is no record of the network."""
        known = [self._fastest[kind] for kind in _kinds(experiment) if kind in self._fastest]
        return known[0] * _work(experiment) if known else None


def _kinds(experiment: Experiment) -> tuple[str, str]:
    """Return the kinds of run that an experiment is, the most specific first."""
    network = f"{experiment.canonical['model']} on {experiment.canonical['data']}"
    return f"{' | '.join(call.name for call in experiment.parsed_method.calls)}: {network}", network


def _work(experiment: Experiment) -> float:
    """Return the epochs that all active clients train in a round; steps count as one epoch."""
    local = dict(experiment.parsed_method.calls[0].complete)
    epochs = local.get("epochs") if local.get("steps") is None else 1
    return float(experiment.canonical["cohort"]) * float(epochs or 1)
