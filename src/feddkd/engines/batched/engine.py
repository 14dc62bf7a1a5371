"""A cohort, and several runs at once, as one program over stacked lanes.

Every client of every run is a lane of the same tensors. Folds go step by step over all lanes that
still have batches; gradients at shared weights are one backward pass, and the teachers' outputs for
all J steps of a round one forward pass. How a step over the lanes is carried out is a strategy,
chosen by timing (strategies.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch.func import vmap

from feddkd.data.batches import Source
from feddkd.data.federation import Federation
from feddkd.engines.batched.folds import Work, apart, chosen, grouped, join, shapes, stacked
from feddkd.engines.batched.gradients import Gradients
from feddkd.engines.batched.lanes import Lane, Store, Tape
from feddkd.engines.batched.memory import Planner, ran_out
from feddkd.engines.batched.strategies import Chooser
from feddkd.engines.client import Memos, gather, restored, retained
from feddkd.engines.interface import Order, Reply
from feddkd.errors import InputError, choices
from feddkd.method import Exchange, Fold, Gradient, probing
from feddkd.models.functional import Model
from feddkd.tensors import Groups

PRECISIONS = ("fp32", "tf32", "bf16")


class StartedFold(NamedTuple):
    """A fold over some lanes before its first step: its work and carry, and the memos, stacked and
    one by one.
    """

    work: Work
    carry: Groups
    memo: Groups
    memos: list[Groups]


@dataclass
class Batched:
    """An engine over federations in memory, one for each run, with the memo every client begins
    with.
    """

    remote: ClassVar[bool] = False
    model: Model
    federations: Sequence[Federation]
    first_memos: Sequence[Groups]
    dtype: torch.dtype = torch.float32
    strategy: str = "auto"
    lanes: int | None = None  # at most so many at once; as many as memory allows unless said
    memory: int | None = None  # bytes that may be planned with; what is free unless said
    # of products: tf32 (on CUDA, where dtype is float32), fp32, or bf16 inside the networks
    precision: str = "tf32"
    memos: Memos = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise InputError(
                f"unknown precision {self.precision!r}; there are: {choices(PRECISIONS)}"
            )
        if self.precision == "bf16":
            self.model = self.model.computing_in(torch.bfloat16)
        self.store = Store.of(self.federations)
        self.device = self.store.x.device
        self.chooser = Chooser(self.strategy, self.device)
        self.planner = Planner(self.device, self.memory)
        self.gradients = Gradients(self.model, self.store, self.dtype, self.chooser)

    def sizes(self, run: int, source: Source = "train") -> Sequence[int]:
        return self.federations[run].counts(source)

    @property
    def strategies(self) -> tuple[str, ...]:
        """Those to choose from."""
        return self.chooser.known

    def facts(self) -> dict[str, Any]:
        """What was decided along the way, for the record."""
        failed = {"failed": dict(self.chooser.failed)} if self.chooser.failed else {}
        return {
            "strategy": dict(self.chooser.chosen),
            "lanes": self.lanes,
            "memory": list(self.planner.plans.values()),
            "chunks": dict(self.planner.most),
            **failed,
        }

    def memos_of(self, run: int) -> Mapping[int, Groups]:
        return {client: memo for (own, client), memo in self.memos.items() if own == run and memo}

    def restore(self, run: int, memos: Mapping[int, Groups]) -> None:
        self.memos = restored(self.memos, run, memos)

    def adopt(self, facts: Mapping[str, Any]) -> None:
        found = facts.get("strategy", {})
        # not from elsewhere
        self.chooser.chosen |= {
            kind: name for kind, name in found.items() if name in self.chooser.known
        }
        self.planner.most |= facts.get("chunks", {})

    def close(self) -> None:
        self.memos.clear()
        self.gradients.clear()
        self.chooser.close()

    def exchange(self, exchange: Exchange, orders: Sequence[Order]) -> list[Reply]:
        if self.device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = (
                self.precision != "fp32"
            )
        if isinstance(exchange.phase.client, Gradient):
            return self._differentiate(exchange, exchange.phase.client, orders)
        assert exchange.phase.client is not None, (
            "a phase without a client half never reaches an engine"
        )
        replies: dict[int, Reply] = {}
        # only those can be lanes of one program
        for alike in grouped([shapes(order.sent) for order in orders]):
            found = self._fold(exchange, exchange.phase.client, [orders[n] for n in alike])
            replies |= dict(zip(alike, found, strict=True))
        return [replies[n] for n in range(len(orders))]

    # --- folds

    def _fold(self, exchange: Exchange, client: Fold, orders: Sequence[Order]) -> list[Reply]:
        lanes = self.store.lay_out(exchange.phase.reads, orders)
        width = max((size for lane in lanes for size in lane.sizes[:1]), default=0)
        kind = f"{exchange.phase.name}, batches of {width}"
        size = self._at_once(kind, exchange, client, orders, lanes)
        done: list[Groups] = []  # uploads, stacked, chunk by chunk
        at = 0
        while at < len(lanes):
            now = lanes[at : at + size]
            try:
                done.append(self._fold_chunk(exchange, client, orders, now))
                at += len(now)
                continue
            except RuntimeError as error:
                if len(now) == 1 or not ran_out(error):
                    raise
            self.chooser.close()  # out here nothing holds on any longer to what did not fit
            size = self.planner.halve(kind, len(lanes), len(now))
            torch.cuda.empty_cache()
        uploads = join(done)
        place = {(lane.order, lane.client): at for at, lane in enumerate(lanes)}
        own = [[place[n, k] for k in order.cohort] for n, order in enumerate(orders)]
        return [
            self._reply(exchange, order, uploads, own[n], len(lanes))
            for n, order in enumerate(orders)
        ]

    def _at_once(
        self,
        kind: str,
        exchange: Exchange,
        client: Fold,
        orders: Sequence[Order],
        lanes: Sequence[Lane],
    ) -> int:
        def start(count: int) -> tuple[Work, Groups]:
            begun = self._begin(exchange, client, orders, lanes[:count])
            return begun.work, begun.carry

        planned = self.planner.lanes(kind, len(lanes), start, trains=exchange.phase.reads.random)
        return planned if self.lanes is None else min(planned, self.lanes)

    def _begin(
        self, exchange: Exchange, client: Fold, orders: Sequence[Order], lanes: Sequence[Lane]
    ) -> StartedFold:
        shared = len({lane.order for lane in lanes}) == 1
        sent = (
            orders[lanes[0].order].sent
            if shared
            else stacked([orders[lane.order].sent for lane in lanes])
        )
        memos = [self._memo(orders[lane.order].run, lane.client) for lane in lanes]
        # in an evaluation only some may hold a teacher, say
        common = set.intersection(*(set(own) for own in memos))
        memo = stacked([{group: own[group] for group in common} for own in memos])
        carry = self._started(client, sent, memo, shared, len(lanes))
        work = Work(
            self.model,
            self.store,
            exchange.phase,
            client,
            sent,
            shared,
            Tape.of(lanes, self.dtype, self.device),
            self.dtype,
        )
        return StartedFold(work, carry, memo, memos)

    def _started(
        self, client: Fold, sent: Groups, memo: Groups, shared: bool, lanes: int
    ) -> Groups:
        if shared and not memo:  # everybody starts alike: once will do
            same = client.start(self.model, sent, memo)
            return {
                g: {name: tensor.expand(lanes, *tensor.shape) for name, tensor in own.items()}
                for g, own in same.items()
            }
        over, number = None if shared else 0, torch.arange(lanes, device=self.device)
        carry: Groups = vmap(lambda s, m, _: client.start(self.model, s, m), (over, 0, 0))(
            sent, memo, number
        )
        return carry

    def _fold_chunk(
        self, exchange: Exchange, client: Fold, orders: Sequence[Order], lanes: Sequence[Lane]
    ) -> Groups:
        """The lanes' uploads, stacked; the memos move on."""
        work, carry, memo, memos = self._begin(exchange, client, orders, lanes)
        common, over = set(memo), None if work.shared else 0
        carry = self.chooser.run(work, carry)
        upload, memo = vmap(lambda s, c, m: client.finish(self.model, s, c, m), (over, 0, 0))(
            work.sent, carry, memo
        )
        rows = apart(retained(memo, exchange.retain), len(lanes))
        for lane, own, row in zip(lanes, memos, rows, strict=True):
            others = {group: tensors for group, tensors in own.items() if group not in common}
            self.memos[orders[lane.order].run, lane.client] = {
                **retained(others, exchange.retain),
                **row,
            }
        result: Groups = upload
        return result

    def _reply(
        self, exchange: Exchange, order: Order, uploads: Groups, lanes: list[int], total: int
    ) -> Reply:
        as_they_are = len(lanes) == total and lanes == sorted(lanes)
        own = uploads if as_they_are else chosen(uploads, torch.tensor(lanes, device=self.device))
        return Reply(order.cohort, gather(exchange.phase, own, self._examples(exchange, order)))

    def _examples(self, exchange: Exchange, order: Order) -> list[int]:
        federation, source = self.federations[order.run], exchange.phase.reads.source
        return [len(federation.indices(source, client)) for client in order.cohort]

    def _memo(self, run: int, client: int) -> Groups:
        return self.memos.get((run, client), self.first_memos[run])

    # --- gradients at shared weights

    def _differentiate(
        self, exchange: Exchange, client: Gradient, orders: Sequence[Order]
    ) -> list[Reply]:
        gathered = self.gradients(exchange, client, orders, self._memo)
        probe = probing(exchange.phase)
        if probe is not None and client.probe is not None:
            found = self._fold(replace(exchange, phase=probe, retain=None), client.probe, orders)
            gathered = [
                {**own, **reply.collected} for own, reply in zip(gathered, found, strict=True)
            ]
        for order in orders:
            for k in order.cohort:
                self.memos[order.run, k] = retained(self._memo(order.run, k), exchange.retain)
        return [Reply(order.cohort, own) for order, own in zip(orders, gathered, strict=True)]
