"""A cohort, and several runs at once, as one program over stacked lanes.

Every client of every run is a lane of the same tensors. Folds go step by step over all lanes that still have batches; gradients
at shared weights are one backward pass, and the teachers' outputs for all J steps of a round one forward pass. How a step over
the lanes is carried out is a strategy, chosen by timing (strategies.py).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap

from feddkd.data.batches import Source
from feddkd.data.federation import Federation
from feddkd.engines import Order, Reply
from feddkd.engines.lanes import Lane, Store, Tape
from feddkd.engines.serial import gather, retained
from feddkd.engines.strategies import Chooser
from feddkd.engines.work import Work, chosen, join, lanes_in, stacked, take
from feddkd.errors import InputError, choices
from feddkd.method import Batch, Collect, Exchange, Fold, Gradient
from feddkd.models import Model
from feddkd.params import Groups, Tensors

log = logging.getLogger(__name__)
PRECISIONS = ("fp32", "tf32", "bf16")


class Lesson(NamedTuple):
    """What some clients of a run, with batches of one size, teach in a round: batches and targets have a leading axis over
    steps."""

    clients: list[int]  # positions in the cohort
    memo: Groups
    batches: Batch
    targets: Tensor


@dataclass
class Batched:
    """An engine over federations in memory, one for each run, with the memo every client begins with."""

    model: Model
    federations: Sequence[Federation]
    first_memos: Sequence[Groups]
    dtype: torch.dtype = torch.float32
    strategy: str = "auto"
    lanes: int | None = None  # at most so many at once; all of them, while memory lasts, unless said
    precision: str = "tf32"  # of products: tf32 (on CUDA, where dtype is float32), fp32, or bf16 inside the networks
    memos: dict[tuple[int, int], Groups] = field(default_factory=dict)  # (run, client) -> memo

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise InputError(f"unknown precision {self.precision!r}; there are: {choices(PRECISIONS)}")
        if self.precision == "bf16":
            self.model = self.model.computing_in(torch.bfloat16)
        self.store = Store.of(self.federations)
        self.device = self.store.x.device
        self.chooser = Chooser(self.strategy, self.device)
        self._lessons: dict[int, tuple[tuple[int, ...], list[Lesson]]] = {}  # run -> this round's, and for which cohort

    def sizes(self, run: int, source: Source = "train") -> Sequence[int]:
        return self.federations[run].counts(source)

    def facts(self) -> dict[str, Any]:
        """What was decided along the way, for the record."""
        return {"strategy": dict(self.chooser.chosen), "lanes": self.lanes}

    def memos_of(self, run: int) -> Mapping[int, Groups]:
        return {client: memo for (own, client), memo in self.memos.items() if own == run and memo}

    def restore(self, run: int, memos: Mapping[int, Groups]) -> None:
        self.memos |= {(run, client): memo for client, memo in memos.items()}

    def adopt(self, facts: Mapping[str, Any]) -> None:
        found = facts.get("strategy", {})
        self.chooser.chosen |= {kind: name for kind, name in found.items() if name in self.chooser.known}  # not from elsewhere
        self.lanes = facts.get("lanes", self.lanes)

    def close(self) -> None:
        self.memos.clear()
        self._lessons.clear()
        self.chooser.close()

    def exchange(self, exchange: Exchange, orders: Sequence[Order]) -> list[Reply]:
        if self.device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self.precision != "fp32"
        if isinstance(exchange.phase.client, Gradient):
            return [self._differentiate(exchange, exchange.phase.client, order) for order in orders]
        assert exchange.phase.client is not None, "a phase without a client half never reaches an engine"
        return self._fold(exchange, exchange.phase.client, orders)

    # --- folds

    def _fold(self, exchange: Exchange, client: Fold, orders: Sequence[Order]) -> list[Reply]:
        lanes = self.store.lay_out(exchange.phase.reads, orders)
        done: list[Groups] = []  # uploads, stacked, chunk by chunk
        at = 0
        while at < len(lanes):
            now = lanes[at : at + (self.lanes or len(lanes))]
            try:
                done.append(self._fold_chunk(exchange, client, orders, now))
                at += len(now)
            except torch.OutOfMemoryError:
                if len(now) == 1:
                    raise
                self.lanes = (len(now) + 1) // 2
                self.chooser.close()
                torch.cuda.empty_cache()
                log.warning("%d lanes do not fit in memory; going on with %d at once", len(now), self.lanes)
        uploads = join(done)
        place = {(lane.order, lane.client): at for at, lane in enumerate(lanes)}
        return [self._reply(exchange, order, uploads, [place[n, k] for k in order.cohort]) for n, order in enumerate(orders)]

    def _fold_chunk(self, exchange: Exchange, client: Fold, orders: Sequence[Order], lanes: Sequence[Lane]) -> Groups:
        """The lanes' uploads, stacked; the memos move on."""
        shared = len({lane.order for lane in lanes}) == 1
        sent = orders[lanes[0].order].sent if shared else stacked([orders[lane.order].sent for lane in lanes])
        memos = [self._memo(orders[lane.order].run, lane.client) for lane in lanes]
        common = set.intersection(*(set(own) for own in memos))  # in an evaluation only some may hold a teacher, say
        memo = stacked([{group: own[group] for group in common} for own in memos])
        over, number = None if shared else 0, torch.arange(len(lanes), device=self.device)
        carry = vmap(lambda s, m, _: client.start(self.model, s, m), (over, 0, 0))(sent, memo, number)
        tape = Tape.of(lanes, self.dtype, self.device)
        work = Work(self.model, self.store, exchange.phase, client, sent, shared, tape, self.dtype)
        carry = self.chooser.run(work, carry)
        upload, memo = vmap(lambda s, c, m: client.finish(self.model, s, c, m), (over, 0, 0))(sent, carry, memo)
        for at, lane in enumerate(lanes):
            apart = {group: own for group, own in memos[at].items() if group not in common}
            self.memos[orders[lane.order].run, lane.client] = retained({**apart, **take(memo, at)}, exchange.retain)
        result: Groups = upload
        return result

    def _reply(self, exchange: Exchange, order: Order, uploads: Groups, lanes: list[int]) -> Reply:
        own = uploads if lanes == list(range(lanes_in(uploads))) else chosen(uploads, torch.tensor(lanes, device=self.device))
        return Reply(order.cohort, gather(exchange.phase, own, self._examples(exchange, order)))

    def _examples(self, exchange: Exchange, order: Order) -> list[int]:
        federation, source = self.federations[order.run], exchange.phase.reads.source
        return [len(federation.indices(source, client)) for client in order.cohort]

    def _memo(self, run: int, client: int) -> Groups:
        return self.memos.get((run, client), self.first_memos[run])

    # --- gradients at shared weights

    def _differentiate(self, exchange: Exchange, client: Gradient, order: Order) -> Reply:
        kept = self._lessons.get(order.run)
        if exchange.step == 1 or kept is None or kept[0] != order.cohort:  # somebody may have fallen silent since the first step
            kept = self._lessons[order.run] = order.cohort, self._teach(exchange, client, order)
        lessons, step = kept[1], exchange.step - 1
        (rule,) = exchange.phase.collect.values()
        if rule is Collect.EVERY:
            gradient = self._every(client, order, lessons, step)
        else:
            counts = self._examples(exchange, order) if rule is Collect.MEAN_BY_EXAMPLES else [1] * len(order.cohort)
            gradient = self._mean(exchange, client, order, lessons, counts)
        if exchange.step == exchange.steps:
            del self._lessons[order.run]
        for k in order.cohort:
            self.memos[order.run, k] = retained(self._memo(order.run, k), exchange.retain)
        return Reply(order.cohort, {"gradient": gradient})

    def _mean(self, exchange: Exchange, client: Gradient, order: Order, lessons: list[Lesson], counts: list[int]) -> Tensors:
        """The gradient of the mean of the clients' losses: the mean of their gradients, in one pass at shared weights."""
        total, parts = sum(counts), []
        for lesson in lessons:
            share = torch.tensor([counts[at] / total for at in lesson.clients], dtype=self.dtype)
            parts.append((*_at(lesson, exchange.step - 1), share.to(self.device, non_blocking=True)))

        def gradient(sent: Groups, parts: list[tuple[Groups, Batch, Tensor, Tensor]]) -> Tensors:
            def loss(w: Tensors) -> Tensor:
                one = self._client_loss(client, sent, w)
                return torch.stack([(share * vmap(one)(memo, batch, taught)).sum() for memo, batch, taught, share in parts]).sum()

            slope: Tensors = grad(loss)(sent["params"])
            return slope

        mean: Tensors = self._call(f"{exchange.phase.name} gradient", gradient, (order.sent, parts))
        return mean

    def _call(self, name: str, function: Callable[..., Any], inputs: Any) -> Any:
        """As a CUDA graph where that is possible."""
        if self.device.type == "cuda" and self.chooser.records:
            return self.chooser.recordings.call(name, function, inputs, self.chooser.fuses)
        return function(*inputs)

    def _every(self, client: Gradient, order: Order, lessons: list[Lesson], step: int) -> Tensors:
        found: dict[int, Groups] = {}
        for lesson in lessons:

            def own(memo: Groups, batch: Batch, taught: Tensor) -> Tensors:
                loss = self._client_loss
                slope: Tensors = grad(lambda w: loss(client, order.sent, w)(memo, batch, taught))(order.sent["params"])
                return slope

            gradients = {"gradient": vmap(own)(*_at(lesson, step))}
            found |= {position: take(gradients, at) for at, position in enumerate(lesson.clients)}
        return stacked([found[position] for position in range(len(order.cohort))])["gradient"]

    def _client_loss(self, client: Gradient, sent: Groups, w: Tensors) -> Callable[[Groups, Batch, Tensor], Tensor]:
        def loss(memo: Groups, batch: Batch, taught: Tensor) -> Tensor:
            return client.loss(self.model, w, sent, memo, batch, taught)

        return loss

    def _teach(self, exchange: Exchange, client: Gradient, order: Order) -> list[Lesson]:
        """The batches of all steps and what the teachers make of them; batches of other sizes make a lesson of their own."""
        lanes = self._reading_lists(exchange, order)
        sizes = [len(lane.batches[0]) for lane in lanes]
        groups = [[at for at, own in enumerate(sizes) if own == size] for size in sorted(set(sizes))]
        if not self.model.norm_names:  # without batch norm padding is not felt
            groups = [list(range(len(lanes)))]
        return [self._lesson(client, order, [lanes[at] for at in group], group, exchange) for group in groups]

    def _lesson(self, client: Gradient, order: Order, lanes: list[Lane], clients: list[int], exchange: Exchange) -> Lesson:
        tape = Tape.of(lanes, self.dtype, self.device)
        steps, count = tape.sizes.shape
        indices, share, keys = (tensor.flatten(0, 1) for tensor in (tape.indices, tape.share, tape.keys))
        read = self.store.read(indices, share, keys, self.dtype, exchange.phase.reads.random)
        batches = Batch(*(tensor.reshape(steps, count, *tensor.shape[1:]) for tensor in read))
        memo = stacked([self._memo(order.run, lane.client) for lane in lanes])

        def targets(memo: Groups, batches: Batch) -> Tensor:
            return vmap(lambda batch: client.targets(self.model, memo, batch))(batches)

        taught = self._call(f"{exchange.phase.name} targets", vmap(targets, (0, 1), 1), (memo, batches))
        return Lesson(clients, memo, batches, taught.clone())

    def _reading_lists(self, exchange: Exchange, order: Order) -> list[Lane]:
        """A lane a client whose batches are those of the phase's repetitions from this one on."""
        repetitions = [(*order.key[:-1], step) for step in range(1, exchange.steps + 1)]
        drawn = [self.store.lay_out(exchange.phase.reads, [order._replace(key=key)]) for key in repetitions]
        return [
            Lane(0, lanes[0].client, [lane.batches[0] for lane in lanes], np.array([lane.keys[0] for lane in lanes]))
            for lanes in zip(*drawn, strict=True)
        ]


def _at(lesson: Lesson, step: int) -> tuple[Groups, Batch, Tensor]:
    return lesson.memo, Batch(*(tensor[step] for tensor in lesson.batches)), lesson.targets[step]
