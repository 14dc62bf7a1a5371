"""Plays the rounds of a job on an engine phase by phase, without evaluation, to time them."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from feddkd.bench.jobs import BenchJob
from feddkd.bench.setting import BenchSetting
from feddkd.data.federation import Federation
from feddkd.engines.interface import Engine
from feddkd.methods import parse
from feddkd.rounds.evaluation import Evaluation
from feddkd.rounds.exchange import Exchanges
from feddkd.rounds.loop import PATIENT, choose
from feddkd.rounds.metrics import find_metrics
from feddkd.rounds.turns import Turn
from feddkd.simulation import Job, Simulation, Start
from feddkd.tensors import Groups


@dataclass
class Drive:
    """Plays single phases of a round.

    Every round starts from the same weights, so repeats do the same work on the round's batches.
    """

    simulation: Simulation
    starts: list[Groups] = field(init=False)  # one for each run; the run's number is its seed
    turns: list[Turn] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.starts = self.states
        self.exchanges = Exchanges(self.simulation.model, self.engine, PATIENT)

    @property
    def states(self) -> list[Groups]:
        """The present states of the servers."""
        return [run.state for run in self.simulation.runs]

    @property
    def engine(self) -> Engine:
        """The engine that computes."""
        return self.simulation.engine

    def play(self, t: int, phase: int = 0) -> None:
        """Perform the exchanges of one phase in round t. Phase 0 begins the round."""
        if phase == 0:
            self.turns = [self._turn(index, t) for index in range(len(self.starts))]
        for exchange in self.simulation.job.method.plan(t):
            if exchange.index == phase:
                self.exchanges.perform(exchange, self.turns)

    def _turn(self, index: int, t: int) -> Turn:
        run = self.simulation.runs[index]
        run.state = self.starts[index]
        clients = choose(
            run.seed, t, len(self.engine.sizes(index)), self.simulation.job.cohort_size
        )
        return Turn(run, t, clients, {})


@contextmanager
def driven(job: BenchJob, setting: BenchSetting, federations: list[Federation]) -> Iterator[Drive]:
    """Open a job on the setting's engine, one run per federation; free its memory at the end."""
    model, method = job.network(), parse(job.method)
    starts = [
        Start(seed, federation, *model.initial(("init", seed)))
        for seed, federation in enumerate(federations)
    ]
    judged = Evaluation(metrics=find_metrics(model.task.metrics))
    played = Job(model, method, starts, setting.dtype, cohort=job.cohort, evaluation=judged)
    with Simulation(played, setting.engine, str(setting.device), setting.options) as simulation:
        yield Drive(simulation)
    del simulation
    gc.collect()
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()
