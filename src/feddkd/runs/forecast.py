"""Forecasts of what runs take: time, memory and bytes.

Each phase is timed with few steps and with more steps. The difference is the time of a step, the
rest the time of an exchange. Memory is measured during these trials. Bytes do not depend on steps,
so those of one exchange of a phase are those of all; they vary only where models go from client to
client (astraea).
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, get_args

import torch

from feddkd.engines.batched.strategies import wait_for
from feddkd.engines.interface import Engine, Order, Reply
from feddkd.engines.memory import peak_memory
from feddkd.engines.select import find_device, open_engine
from feddkd.experiment import Experiment
from feddkd.method import Exchange, Method, Phase
from feddkd.rounds.costs import Costs
from feddkd.rounds.loop import PATIENT
from feddkd.rounds.selection.cohorts import asking
from feddkd.rounds.selection.rule import Statistic
from feddkd.runs.prepare import prepare
from feddkd.runs.runner import How
from feddkd.runs.session import job
from feddkd.simulation import Simulation
from feddkd.spec.schedules import Repeat

FEW, MORE = 2, 6  # steps of a trial
ASKING = [asking(statistic).name for statistic in get_args(Statistic)]
TURNS = 2  # repetitions of a phase in a trial


@dataclass(frozen=True)
class Forecast:
    """Time, memory and bytes of runs in lock-step."""

    engine: str
    seconds: float
    memory: int | None  # peak of the trial in bytes; None if it cannot be measured
    bytes_up: int  # of each run
    bytes_down: int


class TimedExchange(NamedTuple):
    """One exchange of a trial."""

    phase: Phase
    seconds: float
    steps: float  # of a client, on average
    costs: Costs


class TrialTimes(NamedTuple):
    """The times of a trial."""

    first: float  # seconds by which the first round took longer
    besides: float  # seconds of a round outside exchanges
    phases: list[list[TimedExchange]]  # the exchanges of each phase
    others: list[TimedExchange]  # evaluation and diagnostics


class Watched:
    """An engine that notes the time and the costs of each exchange."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self.engine, self.device = engine, device
        self.seen: list[TimedExchange] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def exchange(self, exchange: Exchange, orders: Sequence[Order]) -> list[Reply]:
        began = time.perf_counter()
        replies = self.engine.exchange(exchange, orders)
        wait_for(self.device)
        seconds = time.perf_counter() - began
        phase, run = exchange.phase, orders[0].run
        sizes = self.engine.sizes(run, phase.reads.source)
        asked = [sizes[client] for order in orders for client in order.cohort if client >= 0]
        steps = statistics.fmean(phase.reads.count(n) for n in asked) if asked else 1.0
        of_run = [at for at, order in enumerate(orders) if order.run == run]
        paid = Costs()
        if phase.at == "clients":
            first_orders, first_replies = (
                [orders[at] for at in of_run],
                [replies[at] for at in of_run],
            )
            paid = Costs().after(phase, first_orders, first_replies, [], 1)
        self.seen.append(TimedExchange(phase, seconds, steps, paid))
        return replies


def forecast(experiments: Sequence[Experiment], how: How, done: int = 0) -> Forecast:
    """Return what experiments that differ in their seed alone take from round `done` + 1 on."""
    first, place = experiments[0], find_device(how.device)
    prepared = [prepare(experiment, how.data) for experiment in experiments]
    tried = replace(job(experiments, prepared), tolerance=PATIENT)
    make = partial(open_engine, how.engine, options=how.options)
    host: Watched

    def watched(*parts: Any) -> Any:
        nonlocal host
        host = Watched(make(*parts), place)
        return host

    with Simulation(tried, watched, how.device) as simulation:
        method = first.parsed_method.fitted(simulation.model)
        few, more = (_trial(simulation, host, method, steps) for steps in (FEW, MORE))
    sizes = [size for start in tried.starts for size in start.federation.sizes]
    last = first.length(how.until)
    rounds = last - done
    # once: choosing and compiling; in every round: evaluation, and the rest of the server's work
    every_round = sum(seen.seconds for seen in few.others) + min(few.besides, more.besides)
    seconds = few.first + rounds * every_round
    up = down = 0
    for seen in few.others:
        if seen.phase.name in ASKING:  # a selection asks clients in every round
            up += rounds * seen.costs.bytes_up
            down += rounds * seen.costs.bytes_down
    for phase, short, long in zip(method.phases, few.phases, more.phases, strict=True):
        if short and long:
            times, costs = phase.repeat.total(done + 1, last), short[0].costs
            if phase is method.judging:
                times = rounds * method.evaluations
            steps = statistics.fmean(phase.reads.count(n) for n in sizes)
            seconds += times * _seconds(short, long, steps)
            up, down = up + times * costs.bytes_up, down + times * costs.bytes_down
    return Forecast(type(host.engine).__name__.lower(), seconds, peak_memory(place), up, down)


def _trial(simulation: Simulation, host: "Watched", method: Method, steps: int) -> TrialTimes:
    """Time a short round, after one that warms up."""
    short = replace(method, phases=tuple(shortened(phase, steps) for phase in method.phases))
    last, took = simulation.job.rounds, list[float]()
    for _ in range(2):
        began = time.perf_counter()
        host.seen.clear()
        for _ in simulation.play(short, last, last):
            pass
        took.append(time.perf_counter() - began)
    phases = [[seen for seen in host.seen if seen.phase is phase] for phase in short.phases]
    others = [seen for seen in host.seen if not any(seen.phase is phase for phase in short.phases)]
    besides = took[1] - sum(seen.seconds for seen in host.seen)
    return TrialTimes(took[0] - took[1], besides, phases, others)


def shortened(phase: Phase, steps: int) -> Phase:
    """Return a phase with few steps and few repetitions in every round."""
    few = replace(phase.reads, steps=min(steps, phase.reads.steps or steps))
    return replace(phase, repeat=Repeat(min(phase.repeat.times, TURNS)), reads=few)


def _seconds(few: Sequence[TimedExchange], more: Sequence[TimedExchange], steps: float) -> float:
    """Return the seconds of an exchange with some steps, on the line through two timed ones."""
    x, y = few[0].steps, statistics.fmean(exchange.seconds for exchange in few)
    further, later = more[0].steps, statistics.fmean(exchange.seconds for exchange in more)
    if x == further:
        return min(y, later)
    return y + max(0.0, later - y) / (further - x) * (steps - x)
