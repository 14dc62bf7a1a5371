"""The loop: cohort -> exchanges -> evaluate -> row. It reads like Algorithm 1.

Several runs (seeds of one experiment) go through it in lock-step; a run's numbers do not depend on who runs beside it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import islice
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
from feddkd.method import Collect, Exchange, Method, Part, Phase
from feddkd.models import Model
from feddkd.params import Groups, Tensors, combine, stack, weighted_mean

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
    method = method.fitted(model)
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
    """One exchange: the runs' states move on; returns who is left."""
    rates = [exchange.rates(t, run.like) for run in runs]
    orders = [_orders(exchange, *each, t) for each in zip(runs, cohorts, rates, strict=True)]
    every = [order for own in orders for order in own]
    asks = exchange.phase.client is not None and every
    replies = iter(engine.exchange(exchange, every) if asks else [Reply(order.cohort, {}) for order in every])
    own_replies = [list(islice(replies, len(own))) for own in orders]
    each_run = zip(runs, cohorts, orders, own_replies, rates, strict=True)
    return [_take_in(model, engine, exchange, *each, t) for each in each_run]


def _orders(exchange: Exchange, run: Run, cohort: tuple[int, ...], rate: Tensors, t: int) -> list[Order]:
    """One order for the whole cohort, or one for each part of it."""
    phase, key = exchange.phase, (run.seed, t, exchange.index, exchange.step)
    everybody = [Part(cohort if phase.at == "clients" else (SERVER,), {})]
    common = {**{name: run.state[name] for name in phase.sends}, "rates": rate}
    parts = phase.parts(run.state, cohort, exchange.step) if phase.parts else everybody
    return [Order(run.index, {**common, **part.sent}, part.clients, key) for part in parts]


def _take_in(
    model: Model, engine: Engine, exchange: Exchange, run: Run, cohort: tuple[int, ...], orders: Sequence[Order],
    replies: Sequence[Reply], rate: Tensors, t: int,
) -> tuple[int, ...]:  # fmt: skip
    """The run's state moves on; returns who is left for later exchanges: all but those who were asked in vain."""
    phase = exchange.phase
    asked, answered = ({k for one in many for k in one} for many in ([o.cohort for o in orders], [r.clients for r in replies]))
    left = tuple(client for client in cohort if client not in asked - answered)
    _check_answered(exchange, run, left if phase.at == "clients" else tuple(answered), t)
    replies = [reply for reply in replies if reply.clients]
    if not replies:
        return left
    clients = [client for reply in replies for client in reply.clients] if phase.at == "clients" else list(cohort)
    sizes = engine.sizes(run.index, "train" if phase.client is None else phase.reads.source)
    examples = [sizes[client] for client in clients]
    if phase.client is not None and phase.at == "clients":
        run.costs = run.costs.after(phase, orders, replies, examples, len(left))
    who = _who(tuple(clients), tuple(examples), len(sizes), run.like.dtype, run.like.device)
    run.state = phase.server(model, run.state, _together(phase, replies, sizes), {**rate, **who})
    return left


@lru_cache(maxsize=256)
def _who(
    clients: tuple[int, ...], examples: tuple[int, ...], total: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Who answered, for the server. Kept, since through the J steps of a round it is the same: copied to the device once."""
    share = torch.tensor(len(clients) / total, dtype=dtype, device=device)
    return {"clients": torch.tensor(clients, device=device), "examples": torch.tensor(examples, device=device), "share": share}


def _together(phase: Phase, replies: Sequence[Reply], sizes: Sequence[int]) -> Groups:
    """What the parts of a cohort sent, as if it had been gathered at once."""
    if len(replies) == 1:
        return replies[0].collected

    def one(group: str, rule: Collect) -> Tensors:
        parts = [reply.collected[group] for reply in replies]
        if rule is Collect.EVERY:
            return combine(lambda *tensors: torch.cat(tensors), *parts)
        examples = rule is Collect.MEAN_BY_EXAMPLES
        return weighted_mean(stack(parts), [sum(sizes[k] if examples else 1 for k in reply.clients) for reply in replies])

    rules = {**phase.collect, **dict.fromkeys(phase.every, Collect.EVERY)}
    return {group: one(group, rule) for group, rule in rules.items()}


def _check_answered(exchange: Exchange, run: Run, clients: tuple[int, ...], t: int) -> None:
    if not clients:
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
