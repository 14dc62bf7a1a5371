"""One exchange of several runs in lock-step: orders to clients, their replies, the server's step.

With `careful` every client's upload is checked before it counts. This takes longer and waits for
the device, so a round is played this way only after it is known to have gone wrong.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
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
    """One run: the server's state and the costs so far. `index` is the engine's number for it."""

    index: int
    seed: int
    state: Groups
    has_validation: bool
    costs: Costs = field(default_factory=Costs)
    error: RunError | None = None  # the reason why it stopped early

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype and the device of the run."""
        for group in self.state.values():
            for tensor in group.values():
                if tensor.is_floating_point():
                    return tensor
        return torch.zeros(())


@dataclass
class Turn:
    """One run in one round: the clients that are still in the cohort, and the row to record."""

    run: Run
    round: int
    cohort: tuple[int, ...]
    row: Row
    over: bool = False  # the round has ended before its last exchange
    failed: bool = False  # the server's half raised an error, perhaps because of bad numbers
    loss_is_finite: bool = True  # in all evaluations of the round

    def where(self, exchange: Exchange) -> str:
        """Return the phase, step, round and seed as text."""
        return (
            f"phase {exchange.phase.name!r}, step {exchange.step}, in round {self.round} (seed"
            f" {self.run.seed})"
        )


class Asked(NamedTuple):
    """The orders of one run in an exchange."""

    turn: Turn
    rates: Tensors
    orders: list[Order]
    absent: dict[int, str]  # client -> the reason why its reply does not count


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
        bad = _bad_clients(asked, replies, memos)
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
        _note_missing(exchange, asked, replies)
        replies = [reply for reply in replies if reply.clients]
        clients = list(turn.cohort)
        if phase.at == "clients":
            clients = [client for reply in replies for client in reply.clients]
        sizes = self.engine.sizes(run.index, phase.reads.source if phase.client else "train")
        examples = [sizes[client] for client in clients]
        if phase.asks_clients and asked.orders:
            run.costs = run.costs.after(phase, asked.orders, replies, examples, len(turn.cohort))
        short = next((reply.short for reply in replies if reply.short), None)
        if len(turn.cohort) < self.tolerance.min_clients:
            short = len(turn.cohort), self.tolerance.min_clients
        if short:
            _end(exchange, turn, *short)
        elif replies:
            like = run.like
            who = _who(tuple(clients), tuple(examples), len(sizes), like.dtype, like.device)
            collected = _together(phase, replies, sizes)
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


def _only(order: Order, asked: Asked, why: str | None) -> Order:
    """Return the order restricted to the clients that are absent for this reason; None: present."""
    clients = tuple(client for client in order.cohort if asked.absent.get(client) == why)
    return order._replace(cohort=clients)


def _bad_clients(asked: Asked, replies: Sequence[Reply], memos: Mapping[int, Groups]) -> set[int]:
    """Return the clients whose upload or memo is not finite."""
    uploads: dict[int, Groups] = {k: reply.collected for reply in replies for k in reply.clients}
    for client, why in asked.absent.items():
        if why == "late":
            uploads[client] = {}
    return {
        client
        for client, upload in uploads.items()
        if not (is_finite(upload) and is_finite(memos.get(client, {})))
    }


def _note_missing(exchange: Exchange, asked: Asked, replies: Sequence[Reply]) -> None:
    """Remove the clients that did not reply from the cohort, and record them under `missing`.

    An engine may have lost further clients. Raise an error if no client is left.
    """
    turn = asked.turn
    expected = {client for order in asked.orders for client in order.cohort}
    answered = {client for reply in replies for client in reply.clients}
    missing = sorted(expected - answered)
    if missing:
        before = turn.row.get("missing", [])
        phase, step = exchange.phase.name, exchange.step
        lines = [[phase, step, client, asked.absent.get(client, "drop")] for client in missing]
        turn.row["missing"] = [*before, *lines]
    turn.cohort = tuple(client for client in turn.cohort if client not in missing)
    if not (turn.cohort if exchange.phase.at == "clients" else answered):
        if "not finite" in asked.absent.values():
            raise DivergedError(f"no client sent finite numbers in {turn.where(exchange)}")
        raise NobodyAnsweredError(f"no client answered {turn.where(exchange)}")


def _end(exchange: Exchange, turn: Turn, answered: int, least: int) -> None:
    """End the round of a run because too few clients answered."""
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
    """Return tensors about the clients that answered, for the server.

    They are cached: through the J steps of a round they are the same, and so are copied to the
    device once.
    """
    share = torch.tensor(len(clients) / total, dtype=dtype, device=device)
    return {
        "clients": torch.tensor(clients, device=device),
        "examples": torch.tensor(examples, device=device),
        "share": share,
    }


def _together(phase: Phase, replies: Sequence[Reply], sizes: Sequence[int]) -> Groups:
    """Return the uploads of the parts of a cohort as one, as if the cohort had not been divided."""
    if len(replies) == 1:
        return replies[0].collected

    def gathered(group: str, rule: Collect) -> Tensors:
        parts = [reply.collected[group] for reply in replies]
        if rule is Collect.EVERY:
            return combine(lambda *tensors: torch.cat(tensors), *parts)
        by_examples = rule is Collect.MEAN_BY_EXAMPLES
        weights = [sum(sizes[k] if by_examples else 1 for k in reply.clients) for reply in replies]
        return weighted_mean(stack(parts), weights)

    rules = {**phase.collect, **dict.fromkeys(phase.every, Collect.EVERY)}
    return {group: gathered(group, rule) for group, rule in rules.items()}
