"""An engine that computes a cohort, and several runs at once, as one program over stacked lanes.

Every client of every run is a lane of the same tensors. A fold goes step by step over all lanes
that still have batches. Gradients at shared weights are one backward pass, and the teachers'
outputs for all J steps of a round one forward pass. A strategy, chosen by timing, says how a step
over the lanes is computed (strategies.py).
"""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.func import vmap

from feddkd.engines.batched.folds import (
    Work,
    equal_positions,
    join_lanes,
    shapes,
    split_lanes,
    stacked,
    stacked_memos,
    take_lanes,
)
from feddkd.engines.batched.gradients import Gradients
from feddkd.engines.batched.lanes import BatchTable, Lane, Store
from feddkd.engines.batched.memory import Planner
from feddkd.engines.batched.strategies import StrategyChooser
from feddkd.engines.client import client_weights, gather, retained, with_facts
from feddkd.engines.interface import Order, Reply
from feddkd.engines.local import LocalEngine
from feddkd.engines.memory import ran_out
from feddkd.errors import unknown
from feddkd.method import Exchange, Fold, Gradient, Phase, probing
from feddkd.method.compression import opened
from feddkd.tensors import Groups, bytes_of
from feddkd.version import __version__

PRECISIONS = ("fp32", "tf32", "bf16")


class StartedFold(NamedTuple):
    """A fold over some lanes before its first step; its memos stacked, and one by one."""

    work: Work
    carry: Groups
    memo: Groups
    memos: list[Groups]


@dataclass
class Batched(LocalEngine):
    """An engine that computes the clients of all runs as lanes of one program."""

    strategy: str = "auto"
    lanes: int | None = None  # at most this many at once; by default as many as fit in memory
    memory: int | None = None  # bytes to plan with; by default the free memory
    # of products: tf32 (on CUDA, where dtype is float32), fp32, or bf16 inside the networks
    precision: str = "tf32"

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            problem = f"unknown precision {self.precision!r}"
            raise unknown(problem, self.precision, PRECISIONS)
        if self.precision == "bf16":
            self.model = self.model.computing_in(torch.bfloat16)
        self.store = Store.of(self.federations)
        self.device = self.store.device
        self.chooser = StrategyChooser(self.strategy, self.device, self._identity())
        self.planner = Planner(self.device, self.memory)
        self.gradients = Gradients(self.model, self.store, self.dtype, self.chooser)

    def _identity(self) -> tuple[object, ...]:
        """Return what decides about speed, besides the kind of work."""
        on_gpu = self.device.type == "cuda"
        place = torch.cuda.get_device_name(self.device) if on_gpu else _processor()
        arithmetic = self.dtype, self.precision, torch.get_num_threads()
        return repr(self.model.net), place, arithmetic, torch.__version__, __version__

    @property
    def strategies(self) -> tuple[str, ...]:
        """The strategies that exist on this device."""
        return self.chooser.names

    def facts(self) -> dict[str, Any]:
        return {
            **self.chooser.facts(),
            "lanes": self.lanes,
            "memory": list(self.planner.plans.values()),
            "chunks": dict(self.planner.most),
        }

    def adopt(self, facts: Mapping[str, Any]) -> None:
        self.chooser.adopt(facts)
        self.planner.most |= facts.get("chunks", {})

    def close(self) -> None:
        super().close()
        self.gradients.clear()
        self.chooser.close()

    def exchange(self, exchange: Exchange, orders: Sequence[Order]) -> list[Reply]:
        if self.device.type == "cuda":
            tf32 = self.precision != "fp32"
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        client = exchange.phase.client
        if orders[0].purpose == "train":
            self.chooser.round = int(orders[0].key[1])
        if isinstance(client, Gradient):
            return self._differentiate(exchange, client, orders)
        assert client is not None, "a phase without a client half never reaches an engine"
        replies: dict[int, Reply] = {}
        # only runs with sent tensors of equal shapes can be lanes of one program
        for numbers in equal_positions([shapes(order.sent) for order in orders]):
            folded = self._fold(exchange, client, [orders[number] for number in numbers])
            replies |= zip(numbers, folded, strict=True)
        return [replies[number] for number in range(len(orders))]

    # --- folds

    def _fold(self, exchange: Exchange, client: Fold, orders: Sequence[Order]) -> list[Reply]:
        lanes = self.store.lanes_of(exchange.phase.reads, orders)
        uploads = self._fold_chunks(exchange, client, orders, lanes)
        row_of = {(lane.order, lane.client): row for row, lane in enumerate(lanes)}
        replies = []
        for number, order in enumerate(orders):
            rows = [row_of[number, client] for client in order.cohort]
            replies.append(self._reply(exchange, order, uploads, rows, len(lanes)))
        return replies

    def _fold_chunks(
        self, exchange: Exchange, client: Fold, orders: Sequence[Order], lanes: Sequence[Lane]
    ) -> Groups:
        """Return the lanes' uploads, stacked; computed in chunks that fit in memory."""
        width = max((size for lane in lanes for size in lane.sizes[:1]), default=0)
        kind = f"{exchange.phase.name}, batches of {width}"
        size = self._at_once(kind, exchange, client, orders, lanes)
        uploads: list[Groups] = []
        start = 0
        while start < len(lanes):
            chunk = lanes[start : start + size]
            try:
                uploads.append(self._fold_chunk(exchange, client, orders, chunk))
                start += len(chunk)
                continue
            except (RuntimeError, MemoryError) as error:
                if len(chunk) == 1 or not ran_out(error):
                    raise
            # outside of `except`: there the error still holds the tensors that did not fit
            self.chooser.clear()
            size = self.planner.halve(kind, len(lanes), len(chunk))
            torch.cuda.empty_cache()
        return join_lanes(uploads)

    def _at_once(
        self,
        kind: str,
        exchange: Exchange,
        client: Fold,
        orders: Sequence[Order],
        lanes: Sequence[Lane],
    ) -> int:
        """Return the number of lanes in a chunk."""

        def start(count: int) -> tuple[Work, Groups]:
            begun = self._begin(exchange, client, orders, lanes[:count])
            return begun.work, begun.carry

        planned = self.planner.lanes(kind, len(lanes), start, trains=exchange.phase.reads.random)
        return planned if self.lanes is None else min(planned, self.lanes)

    def _begin(
        self, exchange: Exchange, client: Fold, orders: Sequence[Order], lanes: Sequence[Lane]
    ) -> StartedFold:
        shared = len({lane.order for lane in lanes}) == 1
        sents = [orders[lane.order].sent for lane in lanes]
        sent = sents[0] if shared else stacked(sents)
        memos = [self._memo_for(exchange.phase, orders[lane.order], lane.client) for lane in lanes]
        memo = stacked_memos(memos)
        carry = self._started(client, sent, memo, shared, len(lanes))
        table = BatchTable.of(lanes, self.dtype, self.device)
        phase = exchange.phase
        work = Work(self.model, self.store, phase, client, sent, shared, table, self.dtype)
        return StartedFold(work, carry, memo, memos)

    def _memo_for(self, phase: Phase, order: Order, client: int) -> Groups:
        federation = self.federations[order.run]
        return with_facts(phase, self.memo(order.run, client), federation, client)

    def _started(
        self, client: Fold, sent: Groups, memo: Groups, shared: bool, lanes: int
    ) -> Groups:
        if shared and not memo:  # all lanes start with the same carry: compute it once
            return {
                group: {name: t.expand(lanes, *t.shape) for name, t in tensors.items()}
                for group, tensors in client.start(self.model, sent, memo).items()
            }
        # the lane numbers are a mapped input for the case that nothing else is
        sent_axis, number = None if shared else 0, torch.arange(lanes, device=self.device)
        start = vmap(lambda s, m, _: client.start(self.model, s, m), (sent_axis, 0, 0))
        carry: Groups = start(sent, memo, number)
        return carry

    def _fold_chunk(
        self, exchange: Exchange, client: Fold, orders: Sequence[Order], lanes: Sequence[Lane]
    ) -> Groups:
        """Return the lanes' uploads, stacked, and keep their memos."""
        work, carry, memo, memos = self._begin(exchange, client, orders, lanes)
        common, sent_axis = set(memo), None if work.shared else 0
        carry = self.chooser.run(work, carry)
        finish = vmap(lambda s, c, m: client.finish(self.model, s, c, m), (sent_axis, 0, 0))
        upload, memo = finish(work.sent, carry, memo)
        # lanes of a cohort that is drawn again as a whole are replaced together: no copies needed
        drawn = any(len(o.cohort) < len(self.federations[o.run].train) for o in orders)
        rows = split_lanes(retained(memo, exchange.retain), len(lanes), copy=drawn)
        for lane, before, row in zip(lanes, memos, rows, strict=True):
            others = {group: tensors for group, tensors in before.items() if group not in common}
            owner = orders[lane.order].run, lane.client
            self.memos[owner] = {**retained(others, exchange.retain), **row}
        result: Groups = upload
        return result

    def _reply(
        self, exchange: Exchange, order: Order, uploads: Groups, rows: list[int], total: int
    ) -> Reply:
        """Return the reply to an order, whose uploads are in these rows of all lanes."""
        if len(rows) < total or rows != sorted(rows):
            uploads = take_lanes(uploads, torch.tensor(rows, device=self.device))
        phase, size = exchange.phase, None
        if phase.codec is not None:
            size = bytes_of(uploads)
            uploads = vmap(partial(opened, phase), (0, None))(uploads, order.sent)
        examples = client_weights(self.federations[order.run], phase, order.cohort)
        return Reply(order.cohort, gather(phase, uploads, examples), uploaded=size)

    # --- gradients at shared weights

    def _differentiate(
        self, exchange: Exchange, client: Gradient, orders: Sequence[Order]
    ) -> list[Reply]:
        gathered = self.gradients(exchange, client, orders, self.memo)
        probe = probing(exchange.phase)
        if probe is not None and client.probe is not None:
            probed = self._fold(replace(exchange, phase=probe, retain=None), client.probe, orders)
            gathered = [
                {**gradient, **reply.collected}
                for gradient, reply in zip(gathered, probed, strict=True)
            ]
        for order in orders:
            for k in order.cohort:
                self.memos[order.run, k] = retained(self.memo(order.run, k), exchange.retain)
        return [Reply(order.cohort, groups) for order, groups in zip(orders, gathered, strict=True)]


def _processor() -> str:
    return f"{platform.machine()} {platform.processor()}, {os.cpu_count()} cores"
