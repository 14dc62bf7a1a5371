"""One exchange of several runs in lock-step: orders to clients, their replies, the server's step.

With `careful` every client's upload is checked before it counts. This takes longer and waits for
the device, so a round is played this way only after it is known to have gone wrong.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from feddkd.data.federation import SERVER
from feddkd.engines.interface import Engine, Order, Reply
from feddkd.errors import DivergedError, RunError
from feddkd.method import Exchange, Part
from feddkd.models.functional import Model
from feddkd.rounds.availability import Tolerance
from feddkd.rounds.replies import (
    bad_clients,
    end_round,
    joined,
    note_missing,
    who_answered,
)
from feddkd.rounds.turns import Asked, Turn
from feddkd.tensors import Groups, Tensors, is_finite

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Exchanges:
    """The parts that carry out exchanges."""

    model: Model
    engine: Engine
    tolerance: Tolerance
    careful: bool = False

    def perform(self, exchange: Exchange, turns: Sequence[Turn]) -> None:
        """Carry out one exchange for all runs that take part, and update their states."""
        taking_part = [turn for turn in turns if _takes_part(turn, exchange)]
        memos_before: dict[int, Mapping[int, Groups]] = {}
        if self.careful:
            for turn in taking_part:
                memos_before[turn.run.index] = self.engine.memos_of(turn.run.index)
        asked = [self._ask(exchange, turn) for turn in taking_part]
        for one, replies in zip(asked, self._replies(exchange, asked), strict=True):
            self._conclude(exchange, one, replies, memos_before.get(one.turn.run.index, {}))

    def _ask(self, exchange: Exchange, turn: Turn) -> Asked:
        """Return the orders of one run, and the clients that will be absent."""
        rates = exchange.rates(turn.round, turn.run.like)
        orders = _orders(exchange, turn, rates)
        if self.careful:  # one order for each client
            orders = [
                order._replace(cohort=(client,)) for order in orders for client in order.cohort
            ]
        if not exchange.phase.asks_clients:
            return Asked(turn, rates, orders, {})
        event = self.tolerance.availability.event
        clients = [client for order in orders for client in order.cohort]
        events = {k: event(turn.run.seed, turn.round, exchange, k) for k in clients}
        absent: dict[int, str] = {client: why for client, why in events.items() if why}
        return Asked(turn, rates, orders, absent)

    def _replies(self, exchange: Exchange, asked: Sequence[Asked]) -> list[list[Reply]]:
        """Return for each run one reply to each of its orders.

        Late clients compute as well, but their replies do not count. An order without clients is
        not sent, and its reply is empty.
        """
        timely = [[_only(order, one, None) for order in one.orders] for one in asked]
        if exchange.phase.client is None:  # the server alone
            return [[Reply(order.cohort, {}) for order in orders] for orders in timely]
        late = [_only(order, one, "late") for one in asked for order in one.orders]
        replies = [[Reply((), {}) for _ in orders] for orders in timely]
        places = [
            (run, number)
            for run, orders in enumerate(timely)
            for number, order in enumerate(orders)
            if order.cohort
        ]
        sent = [timely[run][number] for run, number in places]
        sent += [order for order in late if order.cohort]
        answers = self.engine.exchange(exchange, sent) if sent else []
        for (run, number), reply in zip(places, answers, strict=False):  # late ones come last
            replies[run][number] = reply
        return replies

    def _conclude(
        self,
        exchange: Exchange,
        asked: Asked,
        replies: Sequence[Reply],
        memos_before: Mapping[int, Groups],
    ) -> None:
        """Update one run by its replies. An error stops this run and no other."""
        turn = asked.turn
        try:
            if self.careful:
                replies = self._finite(exchange, asked, replies, memos_before)
            self._update(exchange, asked, replies)
        except RunError as error:
            turn.run.error, turn.over = error, True
        except Exception:
            if self.careful or self.tolerance.on_divergence == "continue":
                raise
            turn.failed = turn.over = True

    def _finite(
        self,
        exchange: Exchange,
        asked: Asked,
        replies: Sequence[Reply],
        memos_before: Mapping[int, Groups],
    ) -> Sequence[Reply]:
        """Return the replies, each of one client, without those that are not finite. The clients
        that sent these get back their memos from before the exchange.
        """
        if not exchange.phase.asks_clients:
            return replies
        run = asked.turn.run.index
        memos = self.engine.memos_of(run)
        bad = bad_clients(asked, replies, memos)
        for client in sorted(bad):
            message = (
                f"the upload of client {client} is not finite: {asked.turn.where(exchange)}, key"
                f" {(*asked.orders[0].key, client)}"
            )
            if self.tolerance.on_divergence == "stop":
                raise DivergedError(message)
            log.warning("%s; it is left out", message)
            asked.absent[client] = "not finite"
        if bad:
            kept = {client: memo for client, memo in memos.items() if client not in bad}
            before = {client: memo for client, memo in memos_before.items() if client in bad}
            self.engine.restore(run, {**kept, **before})
        return [
            reply if not bad.intersection(reply.clients) else Reply((), {}) for reply in replies
        ]

    def _update(self, exchange: Exchange, asked: Asked, replies: Sequence[Reply]) -> None:
        """Update costs, cohort and state of one run."""
        turn, run, phase = asked.turn, asked.turn.run, exchange.phase
        note_missing(exchange, asked, replies)
        short = next((reply.short for reply in replies if reply.short), None)
        replies = [reply for reply in replies if reply.clients]
        clients = list(turn.cohort)
        if phase.at == "clients":
            clients = [client for reply in replies for client in reply.clients]
        source = phase.reads.source if phase.client else "train"
        sizes, weights = (
            self.engine.sizes(run.index, source),
            self.engine.weights(run.index, source),
        )
        examples = [sizes[client] for client in clients]
        if phase.asks_clients and asked.orders:
            active = max(len(turn.cohort), 1)
            run.costs = run.costs.after(phase, asked.orders, replies, examples, active)
        if len(turn.cohort) < self.tolerance.min_clients:
            short = len(turn.cohort), self.tolerance.min_clients
        if short:
            end_round(exchange, turn, *short)
        elif replies:
            like = run.like
            counted = tuple(weights[client] for client in clients)
            who = who_answered(tuple(clients), counted, len(sizes), like.dtype, like.device)
            collected = joined(phase, replies, weights)
            run.state = phase.server(self.model, run.state, collected, {**asked.rates, **who})
        if self.careful and not is_finite(run.state):
            raise DivergedError(
                f"the server's state is not finite after {turn.where(exchange)}, although all"
                " uploads are"
            )


def _takes_part(turn: Turn, exchange: Exchange) -> bool:
    """Return True if the round of a run has not ended, nor the repetitions of the phase."""
    is_over = exchange.phase.over
    if turn.over:
        return False
    return is_over is None or exchange.step == 1 or not is_over(turn.run.state)


def _orders(exchange: Exchange, turn: Turn, rates: Tensors) -> list[Order]:
    """Return one order to the whole cohort, or one to each part of it."""
    phase, run = exchange.phase, turn.run
    key = (run.seed, turn.round, exchange.index, exchange.step)
    whole = [Part(turn.cohort if phase.at == "clients" else (SERVER,), {})]
    common = {**{name: run.state[name] for name in phase.sends}, "rates": rates}
    parts = phase.parts(run.state, turn.cohort, exchange.step) if phase.parts else whole
    return [Order(run.index, {**common, **part.sent}, part.clients, key) for part in parts]


def prepare_order(exchange: Exchange, turn: Turn, clients: tuple[int, ...]) -> Order:
    """Return the order of a phase that clients of a run do before they are judged."""
    run, phase = turn.run, exchange.phase
    sent = {name: run.state[name] for name in phase.sends}
    rates = exchange.rates(turn.round, run.like)
    key = ("evaluate", run.seed, turn.round, 0, exchange.step)
    return Order(run.index, {**sent, "rates": rates}, clients, key)


def _only(order: Order, asked: Asked, why: str | None) -> Order:
    """Return the order restricted to the clients that are absent for this reason; None: present."""
    clients = tuple(client for client in order.cohort if asked.absent.get(client) == why)
    return order._replace(cohort=clients)
