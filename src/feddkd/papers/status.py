"""How much of a paper's tables has been run, and what the rest will cost."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from feddkd.experiment import Experiment
from feddkd.papers.definitions import Paper, length
from feddkd.papers.runs import Run, Runs


@dataclass(frozen=True)
class Progress:
    """What is done of some experiments. `seconds_left` counts those whose cost can be guessed from a record; None: not one."""

    name: str
    runs_done: int
    runs_wanted: int
    rounds_done: int
    rounds_wanted: int
    seconds_left: float | None
    runs_of_unknown_cost: int


def progress(paper: Paper, runs: Runs) -> list[Progress]:
    """A line for each table, and one for all together: tables share runs."""
    wanted = {name: [(one, length(one, table.most())) for one in paper.wanted(table)] for name, table in paper.tables.items()}
    by_length = sorted((each for some in wanted.values() for each in some), key=lambda each: each[1])
    together = {one.digest: (one, rounds) for one, rounds in by_length}  # the longest is the one that stays
    pace = Pace(runs.values())
    return [_progress(name, some, runs, pace) for name, some in [*wanted.items(), ("all", list(together.values()))]]


def _progress(name: str, wanted: Sequence[tuple[Experiment, int]], runs: Runs, pace: "Pace") -> Progress:
    done = [min(rounds, len(runs[one.digest].rounds)) if one.digest in runs else 0 for one, rounds in wanted]
    left = [(one, rounds - there) for (one, rounds), there in zip(wanted, done, strict=True) if there < rounds]
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
    """Seconds a round, from records: of runs that differ in the seed alone, or else of runs of the same network, in proportion
    to a round's local work. A rough guess: it knows nothing of the engine or of how many runs went side by side."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self._families: dict[str, list[float]] = {}
        self._networks: dict[str, list[float]] = {}
        for run in runs:
            if run.rounds:
                pace = run.seconds / len(run.rounds)
                self._families.setdefault(run.experiment.family, []).append(pace)
                self._networks.setdefault(_network(run.experiment), []).append(pace / _work(run.experiment))

    def seconds_a_round(self, experiment: Experiment) -> float | None:
        same = self._families.get(experiment.family)
        if same:
            return sum(same) / len(same)
        like = self._networks.get(_network(experiment))
        return None if like is None else _work(experiment) * sum(like) / len(like)


def _network(experiment: Experiment) -> str:
    return f"{experiment.canonical['model']} on {experiment.canonical['data']}"


def _work(experiment: Experiment) -> float:
    """Epochs that all active clients together train in a round; a number of steps in place of epochs counts as one."""
    local = dict(experiment.parsed_method.calls[0].complete)
    epochs = local.get("epochs") if local.get("steps") is None else 1
    return float(experiment.canonical["cohort"]) * float(epochs or 1)
