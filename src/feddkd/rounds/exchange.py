"""One exchange of several runs in lock-step: who is asked, who answers, and how the server takes it
in.

With `careful` every client's upload is looked at by itself before it counts. That takes longer and
waits for the device, so a round is played in this way only once it is known to have gone wrong.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from feddkd.data.federation import SERVER
from feddkd.engines.interface import Engine, Order, Reply
from feddkd.errors import DivergedError, NobodyAnsweredError, RunError
from feddkd.method import Collect, Exchange, Part, Phase
from feddkd.models.functional import Model
from feddkd.rounds.availability import Tolerance
from feddkd.rounds.costs import Costs
from feddkd.tensors import Groups, Tensors, combine, is_finite, stack, weighted_mean

log = logging.getLogger(__name__)
Row = dict[str, Any]


@dataclass
class Run:
    """One run on its way: what the server holds, and what it has cost. `index` is the engine's
    number for it.
    """

    index: int
    seed: int
    state: Groups
    has_validation: bool
    costs: Costs = field(default_factory=Costs)
    error: RunError | None = None  # why it could not go on

    @property
    def like(self) -> Tensor:
        """A tensor of the run's own type, on its device."""
        every = (
            tensor
            for group in self.state.values()
            for tensor in group.values()
            if tensor.is_floating_point()
        )
        return next(every, torch.zeros(()))


@dataclass
class Turn:
    """A run in one of its rounds: who is left of the cohort, and what is to be told of it."""

    run: Run
    round: int
    cohort: tuple[int, ...]
    row: Row
    over: bool = False  # whether the round has ended before its last exchange
    failed: bool = False  # the server's half raised an error, perhaps because of bad numbers
    loss_is_finite: bool = True  # in all evaluations of the round

    def where(self, exchange: Exchange) -> str:
        return (
            f"phase {exchange.phase.name!r}, step {exchange.step}, in round {self.round} (seed"
            f" {self.run.seed})"
        )


class Asked(NamedTuple):
    """What a run sends out in an exchange."""

    turn: Turn
    rates: Tensors
    orders: list[Order]  # to everybody who is asked
    absent: dict[int, str]  # client -> why its answer does not count


@dataclass(frozen=True)
class Exchanges:
    """How exchanges are carried out."""

    model: Model
    engine: Engine
    tolerance: Tolerance
    careful: bool = False

    def perform(self, exchange: Exchange, turns: Sequence[Turn]) -> None:
        """One exchange for all runs that want it: their states move on."""
        over = exchange.phase.over
        at_it = [
            t
            for t in turns
            if not t.over and (over is None or exchange.step == 1 or not over(t.run.state))
        ]
        held = (
            {turn.run.index: self.engine.memos_of(turn.run.index) for turn in at_it}
            if self.careful
            else {}
        )
        asked = [self._ask(exchange, turn) for turn in at_it]
        replies = self._replies(exchange, asked)
        for one in asked:
            self._conclude(
                exchange,
                one,
                list(islice(replies, len(one.orders))),
                held.get(one.turn.run.index, {}),
            )

    def _ask(self, exchange: Exchange, turn: Turn) -> Asked:
        rates = exchange.rates(turn.round, turn.run.like)
        orders = _orders(exchange, turn, rates)
        if self.careful:
            orders = [
                order._replace(cohort=(client,)) for order in orders for client in order.cohort
            ]
        absent: dict[int, str] = {}
        if exchange.phase.asks_clients:
            event, clients = (
                self.tolerance.availability.event,
                [client for order in orders for client in order.cohort],
            )
            events = {
                client: event(turn.run.seed, turn.round, exchange, client) for client in clients
            }
            absent = {client: why for client, why in events.items() if why}
        return Asked(turn, rates, orders, absent)

    def _replies(self, exchange: Exchange, asked: Sequence[Asked]) -> Iterator[Reply]:
        """One for each order. Who is late computes as well, but is not heard."""
        timely = [_those(order, one, None) for one in asked for order in one.orders]
        if exchange.phase.client is None:
            return iter([Reply(order.cohort, {}) for order in timely])
        late = [_those(order, one, "late") for one in asked for order in one.orders]
        going = [order for order in (*timely, *late) if order.cohort]
        found = iter(self.engine.exchange(exchange, going) if going else [])
        return iter([next(found) if order.cohort else Reply((), {}) for order in timely])

    def _conclude(
        self, exchange: Exchange, asked: Asked, replies: Sequence[Reply], held: Mapping[int, Groups]
    ) -> None:
        """What goes wrong with one run is that run's alone."""
        turn = asked.turn
        try:
            self._take_in(
                exchange,
                asked,
                self._sound(exchange, asked, replies, held) if self.careful else replies,
            )
        except RunError as error:
            turn.run.error, turn.over = error, True
        except Exception:
            if self.careful or self.tolerance.on_divergence == "continue":
                raise
            turn.failed = turn.over = True

    def _sound(
        self, exchange: Exchange, asked: Asked, replies: Sequence[Reply], held: Mapping[int, Groups]
    ) -> Sequence[Reply]:
        """The replies, each of one client, without those that are not finite; who sent such holds
        what it held before.
        """
        if not exchange.phase.asks_clients:
            return replies
        run, memos = asked.turn.run, self.engine.memos_of(asked.turn.run.index)
        late: dict[int, Groups] = {
            client: {} for client, why in asked.absent.items() if why == "late"
        }
        uploads = {client: reply.collected for reply in replies for client in reply.clients} | late
        bad = {
            k
            for k, upload in uploads.items()
            if not (is_finite(upload) and is_finite(memos.get(k, {})))
        }
        for client in sorted(bad):
            said = (
                f"what client {client} sent is not finite: {asked.turn.where(exchange)}, key"
                f" {(*asked.orders[0].key, client)}"
            )
            if self.tolerance.on_divergence == "stop":
                raise DivergedError(said)
            log.warning("%s; it is left out", said)
            asked.absent[client] = "not finite"
        if bad:
            kept = {client: memo for client, memo in memos.items() if client not in bad}
            self.engine.restore(
                run.index,
                {**kept, **{client: memo for client, memo in held.items() if client in bad}},
            )
        return [
            reply if not bad.intersection(reply.clients) else Reply((), {}) for reply in replies
        ]

    def _take_in(self, exchange: Exchange, asked: Asked, replies: Sequence[Reply]) -> None:
        """The run's state moves on.

        All but those who were asked in vain are left for later exchanges.
        """
        turn, run, phase = asked.turn, asked.turn.run, exchange.phase
        _note_missing(exchange, asked, replies)
        replies = [reply for reply in replies if reply.clients]
        clients = (
            [client for reply in replies for client in reply.clients]
            if phase.at == "clients"
            else list(turn.cohort)
        )
        sizes = self.engine.sizes(
            run.index, "train" if phase.client is None else phase.reads.source
        )
        examples = [sizes[client] for client in clients]
        if phase.asks_clients and asked.orders:
            run.costs = run.costs.after(phase, asked.orders, replies, examples, len(turn.cohort))
        short = next((reply.short for reply in replies if reply.short), None)
        if len(turn.cohort) < self.tolerance.min_clients:
            short = len(turn.cohort), self.tolerance.min_clients
        if short:
            _end(exchange, turn, *short)
        elif replies:
            who = _who(tuple(clients), tuple(examples), len(sizes), run.like.dtype, run.like.device)
            run.state = phase.server(
                self.model, run.state, _together(phase, replies, sizes), {**asked.rates, **who}
            )
        if self.careful and not is_finite(run.state):
            raise DivergedError(
                f"what the server holds is not finite after {turn.where(exchange)}, though all it"
                " was sent is"
            )


def _orders(exchange: Exchange, turn: Turn, rates: Tensors) -> list[Order]:
    """One order for the whole cohort, or one for each part of it."""
    phase, run = exchange.phase, turn.run
    key = (run.seed, turn.round, exchange.index, exchange.step)
    everybody = [Part(turn.cohort if phase.at == "clients" else (SERVER,), {})]
    common = {**{name: run.state[name] for name in phase.sends}, "rates": rates}
    parts = phase.parts(run.state, turn.cohort, exchange.step) if phase.parts else everybody
    return [Order(run.index, {**common, **part.sent}, part.clients, key) for part in parts]


def _those(order: Order, asked: Asked, why: str | None) -> Order:
    """An order to those of its clients alone that this befalls."""
    return order._replace(
        cohort=tuple(client for client in order.cohort if asked.absent.get(client) == why)
    )


def _note_missing(exchange: Exchange, asked: Asked, replies: Sequence[Reply]) -> None:
    """Who was asked in vain is out of the round, and stands in its row.

    An engine may have lost somebody, too.
    """
    turn = asked.turn
    everybody = {client for order in asked.orders for client in order.cohort}
    answered = {client for reply in replies for client in reply.clients}
    missing = sorted(everybody - answered)
    if missing:
        told = [
            [exchange.phase.name, exchange.step, client, asked.absent.get(client, "drop")]
            for client in missing
        ]
        turn.row["missing"] = [*turn.row.get("missing", []), *told]
    turn.cohort = tuple(client for client in turn.cohort if client not in missing)
    if not (turn.cohort if exchange.phase.at == "clients" else answered):
        if "not finite" in asked.absent.values():
            raise DivergedError(f"nobody sent finite numbers in {turn.where(exchange)}")
        raise NobodyAnsweredError(f"nobody answered {turn.where(exchange)}")


def _end(exchange: Exchange, turn: Turn, answered: int, least: int) -> None:
    turn.over = True
    turn.row["ended"] = {
        "phase": exchange.phase.name,
        "step": exchange.step,
        "answered": answered,
        "min_clients": least,
    }
    log.warning(
        "too few clients answered %s: %d of at least %d; the round ends there",
        turn.where(exchange),
        answered,
        least,
    )


@lru_cache(maxsize=256)
def _who(
    clients: tuple[int, ...],
    examples: tuple[int, ...],
    total: int,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Tensor]:
    """Who answered, for the server.

    Kept, since through the J steps of a round it is the same: copied to the device once.
    """
    share = torch.tensor(len(clients) / total, dtype=dtype, device=device)
    return {
        "clients": torch.tensor(clients, device=device),
        "examples": torch.tensor(examples, device=device),
        "share": share,
    }


def _together(phase: Phase, replies: Sequence[Reply], sizes: Sequence[int]) -> Groups:
    """What the parts of a cohort sent, as if it had been gathered at once."""
    if len(replies) == 1:
        return replies[0].collected

    def one(group: str, rule: Collect) -> Tensors:
        parts = [reply.collected[group] for reply in replies]
        if rule is Collect.EVERY:
            return combine(lambda *tensors: torch.cat(tensors), *parts)
        examples = rule is Collect.MEAN_BY_EXAMPLES
        return weighted_mean(
            stack(parts),
            [sum(sizes[k] if examples else 1 for k in reply.clients) for reply in replies],
        )

    rules = {**phase.collect, **dict.fromkeys(phase.every, Collect.EVERY)}
    return {group: one(group, rule) for group, rule in rules.items()}
