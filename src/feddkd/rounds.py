"""The loop: cohort -> exchanges -> evaluate -> row. It reads like Algorithm 1.

Several runs (seeds of one experiment) go through it in lock-step; a run's numbers do not depend on who runs beside it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from feddkd.costs import Costs
from feddkd.data.federation import SERVER
from feddkd.diagnostics import diagnose
from feddkd.engines import Engine, Order, Reply
from feddkd.errors import NobodyAnsweredError
from feddkd.evaluate import Measured, Protocol, measure
from feddkd.keys import generator
from feddkd.method import Exchange, Method
from feddkd.models import Model
from feddkd.params import Groups

Row = dict[str, Any]


@dataclass
class Run:
    """One run on its way: what the server holds, and what it has cost. `index` is the engine's number for it."""

    index: int
    seed: int
    state: Groups
    has_validation: bool
    costs: Costs = field(default_factory=Costs)

    @property
    def like(self) -> Tensor:
        """A tensor of the run's own type, on its device."""
        every = (tensor for group in self.state.values() for tensor in group.values() if tensor.is_floating_point())
        return next(every, torch.zeros(()))


def play(
    method: Method,
    model: Model,
    engine: Engine,
    runs: Sequence[Run],
    *,
    cohort: int,
    last: int,
    protocol: Protocol,
    diagnostics: bool = False,
    first: int = 1,
) -> Iterator[list[Row]]:
    """Yield one row a run, round after round; the runs' states and costs go along."""
    for t in range(first, last + 1):
        cohorts = [choose(run.seed, t, len(engine.sizes(run.index)), cohort) for run in runs]
        rows: list[Row] = [{"round": t, "clients": list(cohort)} for cohort in cohorts]
        for run in runs:
            run.state = {**run.state, "start": run.state["params"]}
        averages: list[Groups] | None = None  # the states before anything refined them
        for exchange in method.plan(t, wanted=frozenset({"model"} if diagnostics else ())):
            if exchange.phase.refines and averages is None:
                averages = [run.state for run in runs]
                _judge(engine, runs, rows, protocol, prefix="average_")
            cohorts = _turn(model, engine, exchange, runs, cohorts, t)
        _judge(engine, runs, rows, protocol)
        if diagnostics:
            ends = [run.state for run in runs]
            states = [(run.index, end, before) for run, end, before in zip(runs, ends, averages or ends, strict=True)]
            for row, found in zip(rows, diagnose(engine, states, cohorts, method.plan(t)[-1].retain), strict=True):
                row["diagnostics"] = found
        yield [{**row, **asdict(run.costs)} for row, run in zip(rows, runs, strict=True)]


def choose(seed: int, t: int, clients: int, cohort: int) -> tuple[int, ...]:
    """The active clients of round t, uniformly without replacement, in order of their numbers."""
    drawn = generator(("cohort", seed, t)).choice(clients, size=cohort, replace=False)
    return tuple(sorted(int(client) for client in drawn))


def _turn(
    model: Model, engine: Engine, exchange: Exchange, runs: Sequence[Run], cohorts: Sequence[tuple[int, ...]], t: int
) -> list[tuple[int, ...]]:
    """One exchange for all runs that want it; returns who is left for the round's later exchanges."""
    over = exchange.phase.over
    at_it = [n for n, run in enumerate(runs) if over is None or exchange.step == 1 or not over(run.state)]
    after = list(cohorts)
    if at_it:
        answered = _exchange(model, engine, exchange, [runs[n] for n in at_it], [cohorts[n] for n in at_it], t)
        for n, clients in zip(at_it, answered, strict=True):
            after[n] = clients
    return after


def _exchange(
    model: Model, engine: Engine, exchange: Exchange, runs: Sequence[Run], cohorts: Sequence[tuple[int, ...]], t: int
) -> Sequence[tuple[int, ...]]:
    """One exchange: the runs' states move on; returns who answered, or the same cohorts where no client was asked."""
    phase = exchange.phase
    asked = cohorts if phase.at == "clients" else [(SERVER,)] * len(runs)
    rates = [exchange.rates(t, run.like) for run in runs]
    orders = [
        Order(run.index, {**{name: run.state[name] for name in phase.sends}, "rates": rate}, cohort,
              (run.seed, t, exchange.index, exchange.step))
        for run, rate, cohort in zip(runs, rates, asked, strict=True)
    ]  # fmt: skip
    replies = [Reply(cohort, {}) for cohort in asked] if phase.client is None else engine.exchange(exchange, orders)
    for run, order, reply, rate in zip(runs, orders, replies, rates, strict=True):
        _check_answered(exchange, run, reply, t)
        sizes = engine.sizes(run.index, phase.reads.source)
        if phase.client is not None and phase.at == "clients":
            run.costs = run.costs.after(phase, order, reply, [sizes[client] for client in reply.clients])
        share = run.like.new_tensor(len(reply.clients) / len(sizes))
        run.state = phase.server(model, run.state, reply.collected, {**rate, "share": share})
    return [reply.clients for reply in replies] if phase.at == "clients" else cohorts


def _check_answered(exchange: Exchange, run: Run, reply: Reply, t: int) -> None:
    if not reply.clients:
        raise NobodyAnsweredError(
            f"nobody answered phase {exchange.phase.name!r}, step {exchange.step}, in round {t} (seed {run.seed})"
        )


def _judge(engine: Engine, runs: Sequence[Run], rows: Sequence[Row], protocol: Protocol, prefix: str = "") -> None:
    states = [(run.index, run.state) for run in runs]
    _enter(rows, f"{prefix}test", measure(engine, states, protocol, "test"))
    if all(run.has_validation for run in runs):
        _enter(rows, f"{prefix}validation", measure(engine, states, protocol, "validation"))


def _enter(rows: Sequence[Row], name: str, measured: Sequence[Measured]) -> None:
    for row, result in zip(rows, measured, strict=True):
        row[f"{name}_accuracy"], row[f"{name}_loss"] = result.accuracy, result.loss
        if result.client_accuracy is not None:
            row[f"{name}_client_accuracy"] = result.client_accuracy
