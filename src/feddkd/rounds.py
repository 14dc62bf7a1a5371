"""The loop: cohort -> exchanges -> evaluate -> row. It reads like Algorithm 1.

Several runs (seeds of one experiment) go through it in lock-step; a run's numbers do not depend on who runs beside it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from feddkd.costs import Costs
from feddkd.engines import Engine, Order, Reply
from feddkd.errors import NobodyAnsweredError
from feddkd.evaluate import Measured, Protocol, measure
from feddkd.keys import generator
from feddkd.method import Exchange, Method
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


def play(
    method: Method, engine: Engine, runs: Sequence[Run], *, cohort: int, last: int, protocol: Protocol
) -> Iterator[list[Row]]:
    """Yield one row a run, round after round; the runs' states and costs go along."""
    for t in range(1, last + 1):
        cohorts = [choose(run.seed, t, len(engine.sizes(run.index)), cohort) for run in runs]
        rows: list[Row] = [{"round": t, "clients": list(cohort)} for cohort in cohorts]
        plan = method.plan(t)
        for at, exchange in enumerate(plan):
            cohorts = _exchange(engine, exchange, runs, cohorts, t)
            if exchange.index == 0 and any(later.index > 0 for later in plan[at + 1 : at + 2]):
                _judge(engine, runs, rows, protocol, prefix="average_")
        _judge(engine, runs, rows, protocol)
        yield [{**row, **asdict(run.costs)} for row, run in zip(rows, runs, strict=True)]


def choose(seed: int, t: int, clients: int, cohort: int) -> tuple[int, ...]:
    """The active clients of round t, uniformly without replacement, in order of their numbers."""
    drawn = generator(("cohort", seed, t)).choice(clients, size=cohort, replace=False)
    return tuple(sorted(int(client) for client in drawn))


def _exchange(
    engine: Engine, exchange: Exchange, runs: Sequence[Run], cohorts: Sequence[tuple[int, ...]], t: int
) -> list[tuple[int, ...]]:
    """One exchange for all runs: their states move on; returns who answered, to whom the round's later exchanges go."""
    phase = exchange.phase
    rates = [exchange.rates(t, next(iter(run.state["params"].values()))) for run in runs]
    orders = [
        Order(run.index, {**{name: run.state[name] for name in phase.sends}, "rates": rate}, cohort,
              (run.seed, t, exchange.index, exchange.step))
        for run, rate, cohort in zip(runs, rates, cohorts, strict=True)
    ]  # fmt: skip
    replies = engine.exchange(exchange, orders)
    for run, order, reply, rate in zip(runs, orders, replies, rates, strict=True):
        _take(engine, exchange, run, order, reply, t)
        run.state = phase.server(run.state, reply.collected, rate)
    return [reply.clients for reply in replies]


def _take(engine: Engine, exchange: Exchange, run: Run, order: Order, reply: Reply, t: int) -> None:
    if not reply.clients:
        raise NobodyAnsweredError(
            f"nobody answered phase {exchange.phase.name!r}, step {exchange.step}, in round {t} (seed {run.seed})"
        )
    sizes = engine.sizes(run.index)
    run.costs = run.costs.after(exchange.phase, order, reply, [sizes[client] for client in reply.clients])


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
