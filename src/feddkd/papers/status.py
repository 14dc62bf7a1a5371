"""How much of a paper's tables has been run, and what the rest will cost."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from feddkd.experiment import Experiment
from feddkd.papers.definitions import Paper
from feddkd.papers.results import RecordedRun, Runs


@dataclass(frozen=True)
class Progress:
    """What is done of some experiments.

    `seconds_left` counts those whose cost can be guessed from a record; None: not one.
    """

    name: str
    runs_done: int
    runs_wanted: int
    rounds_done: int
    rounds_wanted: int
    seconds_left: float | None
    runs_of_unknown_cost: int


def progress(paper: Paper, runs: Runs) -> list[Progress]:
    """A line for each table, and one for all together: tables share runs."""
    wanted = {
        name: [(one, one.length(table.most())) for one in paper.wanted(table)]
        for name, table in paper.tables.items()
    }
    by_length = sorted(
        (each for some in wanted.values() for each in some), key=lambda each: each[1]
    )
    # the longest is the one that stays
    together = {one.digest: (one, rounds) for one, rounds in by_length}
    pace = Pace(runs.values())
    return [
        _progress(name, some, runs, pace)
        for name, some in [*wanted.items(), ("all", list(together.values()))]
    ]


def _progress(
    name: str, wanted: Sequence[tuple[Experiment, int]], runs: Runs, pace: "Pace"
) -> Progress:
    done = [
        min(rounds, len(runs[one.digest].rounds)) if one.digest in runs else 0
        for one, rounds in wanted
    ]
    left = [
        (one, rounds - there)
        for (one, rounds), there in zip(wanted, done, strict=True)
        if one.digest not in runs or not runs[one.digest].reaches(rounds)
    ]
    costs = [(pace.seconds_a_round(one), rounds) for one, rounds in left]
    known = [cost * rounds for cost, rounds in costs if cost is not None]
    return Progress(
        name,
        len(wanted) - len(left),
        len(wanted),
        sum(done),
        sum(rounds for _, rounds in wanted),
        round(sum(known), 1) if known or not left else None,
        len(left) - len(known),
    )


class Pace:
    """Seconds a round, from records: the quickest of the same methods on the same network, or else
    of any method on it, in proportion to a round's local work. The quickest, since others may have
    had the machine to share; a rough guess all the same: it knows nothing of the engine or the
    device.
    """

    def __init__(self, runs: Iterable[RecordedRun]) -> None:
        self._quickest: dict[str, float] = {}  # kind of run -> seconds a round, by its work
        for run in runs:
            if run.rounds:
                pace = run.seconds / len(run.rounds) / _work(run.experiment)
                for kind in _kinds(run.experiment):
                    self._quickest[kind] = min(pace, self._quickest.get(kind, pace))

    def seconds_a_round(self, experiment: Experiment) -> float | None:
        known = [self._quickest[kind] for kind in _kinds(experiment) if kind in self._quickest]
        return known[0] * _work(experiment) if known else None


def _kinds(experiment: Experiment) -> tuple[str, str]:
    """From the most like it to the least."""
    network = f"{experiment.canonical['model']} on {experiment.canonical['data']}"
    return f"{' | '.join(call.name for call in experiment.parsed_method.calls)}: {network}", network


def _work(experiment: Experiment) -> float:
    """Epochs that all active clients together train in a round; a number of steps in place of
    epochs counts as one.
    """
    local = dict(experiment.parsed_method.calls[0].complete)
    epochs = local.get("epochs") if local.get("steps") is None else 1
    return float(experiment.canonical["cohort"]) * float(epochs or 1)
