"""Rounds of a job on an engine, without evaluation: what `rounds.play` does, cut into parts that can be timed."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from feddkd.bench.jobs import Job
from feddkd.bench.setting import Setting
from feddkd.data.federation import Federation
from feddkd.engines.interface import Engine, Order
from feddkd.engines.select import find_engine
from feddkd.method import Exchange, Method
from feddkd.methods import parse
from feddkd.models.functional import Model
from feddkd.rounds.loop import choose
from feddkd.tensors import Groups, to


@dataclass
class Drive:
    """Every round starts from the same weights, so that no repeat wanders off; batches are those of the round."""

    model: Model
    method: Method
    engine: Engine
    starts: list[Groups]  # one for each run; the run's number is its seed
    cohort: int
    states: list[Groups] = field(default_factory=list)
    cohorts: list[tuple[int, ...]] = field(default_factory=list)

    def play(self, t: int, phase: int = 0) -> None:
        """The exchanges of one phase in round t. Phase 0 begins the round."""
        if phase == 0:
            self.states = list(self.starts)
            self.cohorts = [choose(run, t, len(self.engine.sizes(run)), self.cohort) for run in range(len(self.starts))]
        for exchange in self.method.plan(t):
            if exchange.index == phase:
                self._perform(exchange, t)

    def _perform(self, exchange: Exchange, t: int) -> None:
        phase = exchange.phase
        rates = [exchange.rates(t, next(iter(state["params"].values()))) for state in self.states]
        orders = [
            Order(
                run,
                {**{name: state[name] for name in phase.sends}, "rates": rate},
                cohort,
                (run, t, exchange.index, exchange.step),
            )
            for run, (state, rate, cohort) in enumerate(zip(self.states, rates, self.cohorts, strict=True))
        ]
        replies = self.engine.exchange(exchange, orders)
        together = zip(self.states, replies, rates, strict=True)
        self.states = [phase.server(self.model, state, reply.collected, rate) for state, reply, rate in together]


@contextmanager
def driven(job: Job, setting: Setting, federations: list[Federation]) -> Iterator[Drive]:
    """A job on the setting's engine, with a run for each federation; everything is given back afterwards."""
    model, method = job.network(), parse(job.method)
    starts, memos = [], []
    for seed in range(len(federations)):
        params, buffers = (to(group, setting.device, setting.dtype) for group in model.initial(("init", seed)))
        state, memo = method.start(model, params, buffers)
        starts.append(state)
        memos.append(memo)
    engine = find_engine(setting.engine)(model, federations, memos, setting.dtype, **setting.options)
    try:
        yield Drive(model, method, engine, starts, job.cohort)
    finally:
        engine.close()
        del engine
        gc.collect()
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()
