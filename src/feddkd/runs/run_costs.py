"""Costs of the runs of an experiment: exchanges, local steps, computation and bytes.

The computation is counted: each client computes one mini-batch in each phase, and the
floating-point operations of matrix products and convolutions in it are counted. So the teacher's
forward pass in DKD counts, which local steps leave out.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from torch.utils.flop_counter import FlopCounterMode

from feddkd.engines.interface import Engine, Order, Reply
from feddkd.engines.serial import Serial
from feddkd.experiment import Experiment
from feddkd.method import Exchange, Phase
from feddkd.rounds.costs import Costs
from feddkd.rounds.loop import PATIENT
from feddkd.runs.forecast import shortened
from feddkd.runs.prepare import prepare
from feddkd.runs.session import job
from feddkd.simulation import Simulation


@dataclass(frozen=True)
class RunCosts:
    """The costs of a run, or of a part of it."""

    communications: float = 0.0
    steps: float = 0.0  # of the average active client, as the paper counts them
    operations: float = 0.0  # of all clients, in floating point
    bytes: float = 0.0  # of all clients, up and down

    def __add__(self, other: "RunCosts") -> "RunCosts":
        return RunCosts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class Counted(NamedTuple):
    """One exchange of a trial."""

    phase: Phase
    operations: int
    examples: int  # read by all its clients
    bytes: int


class CountingEngine:
    """An engine that counts the operations and the bytes of each exchange."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.seen = engine, list[Counted]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def exchange(self, exchange: Exchange, orders: Sequence[Order]) -> list[Reply]:
        with FlopCounterMode(display=False) as counter:
            replies = self.engine.exchange(exchange, orders)
        phase = exchange.phase
        sizes = self.engine.sizes(0, phase.reads.source)
        read = [sizes[client] for order in orders for client in order.cohort if client >= 0]
        examples = sum(phase.reads.examples(n) for n in read)
        paid = Costs().after(phase, orders, replies, [], 1) if phase.asks_clients else Costs()
        bytes_ = paid.bytes_up + paid.bytes_down
        self.seen.append(Counted(phase, counter.get_total_flops(), examples, bytes_))
        return replies


def run_costs(experiment: Experiment, folder: Path | None) -> RunCosts:
    """Return what one run costs, from a round with one step a phase, played on the CPU."""
    prepared = prepare(experiment, folder)
    tried = replace(job([experiment], [prepared]), tolerance=PATIENT)
    host: CountingEngine

    def counting(*parts: Any) -> Any:
        nonlocal host
        host = CountingEngine(Serial(*parts))
        return host

    with Simulation(tried, counting) as simulation:
        method = experiment.parsed_method.fitted(simulation.model)
        short = replace(method, phases=tuple(shortened(phase, 1) for phase in method.phases))
        for _ in simulation.play(short, 1, 1):
            pass
        sizes = simulation.engine.sizes
        costs = {
            id(phase): _of_exchange(
                phase,
                next(one for one in host.seen if one.phase is trial),
                sizes(0, phase.reads.source),
                tried.cohort_size,
            )
            for phase, trial in zip(method.phases, short.phases, strict=True)
        }
    plans = (method.plan(t) for t in range(1, experiment.rounds + 1))
    return sum((costs[id(one.phase)] for one in chain.from_iterable(plans)), RunCosts())


def _of_exchange(phase: Phase, trial: Counted, sizes: Sequence[int], cohort: int) -> RunCosts:
    """Return the costs of one exchange of a phase, from those of its trial."""
    if not phase.asks_clients:
        return RunCosts(operations=trial.operations)
    if phase.reads.source == "none":  # a step without an example is no step
        return RunCosts(1, 0, trial.operations, trial.bytes)
    steps = fmean(phase.reads.count(n) for n in sizes)
    examples = cohort * fmean(phase.reads.examples(n) for n in sizes)
    return RunCosts(1, steps, trial.operations / trial.examples * examples, trial.bytes)
