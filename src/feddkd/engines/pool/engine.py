"""CPU: one process a core, one thread each, images in channels_last; the engine for convolutions
where there is no GPU.

Workers are forked. So they know all that the engine knew at that moment without its being sent: the
network, the data, the phases (closures, which no pickle carries) and the clients' memos. They are
forked anew for a phase they have not seen, once for each that a method has, and are told of memos
that have changed since before they need them. Traces of steps stay with them.

What does travel, weights and memos down and uploads up, lies in anonymous memory files (memfd): no
names in /dev/shm that could outlive the engine, one open file at a time, and all workers read the
same pages.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch

from feddkd.data.federation import Federation
from feddkd.data.transforms import Step
from feddkd.engines.client import ALL, Walk, gather, retained
from feddkd.engines.compile.step_cache import Practice
from feddkd.engines.interface import Order, Reply
from feddkd.engines.pool.workers import Answer, Brief, Crew, Task
from feddkd.engines.serial import Serial
from feddkd.errors import InputError
from feddkd.method import Exchange, Fold, Phase
from feddkd.tensors import Groups, combine, stack


@dataclass
class Pool(Serial):
    """A serial engine whose clients are dealt to worker processes: by default as many as this
    process may use cores.
    """

    workers: int | None = None
    _phases: list[Phase] = field(default_factory=list, init=False, repr=False)
    # (run, client) whose memo is no longer the one that the workers know
    _changed: set[tuple[int, int]] = field(default_factory=set, init=False, repr=False)
    _crew: "Crew | None" = field(default=None, init=False, repr=False)
    _practice: Practice = field(default_factory=Practice, init=False, repr=False)  # a worker's

    def __post_init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise InputError(
                "engine 'pool' forks its workers and shares memory files with them: it needs Linux"
            )
        if device := next((f.x.device for f in self.federations if f.x.device.type != "cpu"), None):
            raise InputError(f"engine 'pool' computes on the CPU, and the data is on {device}")
        if self.workers is not None and self.workers < 1:
            raise InputError(f"engine 'pool' needs at least one worker, not {self.workers}")
        # which is asked for to compare: there not a bit may differ from serial's
        if self.dtype != torch.float64:
            self.federations = [_channels_last(federation) for federation in self.federations]

    def exchange(self, exchange: Exchange, orders: Sequence[Order]) -> list[Reply]:
        tasks = self._longest_first(exchange.phase, orders)
        try:
            crew = self._crew_for(exchange.phase, len(tasks))
            brief = Brief(
                _position(self._phases, exchange.phase),
                exchange.retain,
                orders,
                self._news(orders, tasks),
            )
            answers = crew.perform(brief, tasks, exchange.phase.name)
        except BaseException:  # an interrupt too must leave no worker behind
            self._dismiss()
            raise
        turns: dict[tuple[int, int], list[Answer]] = {}
        for task in tasks:
            turns.setdefault((task.order, task.client), []).append(answers[task])
        return [
            self._reply(exchange.phase, order, [turns[at, k] for k in order.cohort])
            for at, order in enumerate(orders)
        ]

    def restore(self, run: int, memos: Mapping[int, Groups]) -> None:
        self._changed |= {(own, client) for own, client in self.memos if own == run} | {
            (run, client) for client in memos
        }
        super().restore(run, memos)

    def close(self) -> None:
        self._dismiss()
        super().close()

    @property
    def _walk(self) -> Walk:
        return self._practice.walk

    def _longest_first(self, phase: Phase, orders: Sequence[Order]) -> list[Task]:
        """Everybody's turn; one that only adds up what its batches bring, an evaluation, is taken
        apart into them.
        """
        reads, apart = phase.reads, isinstance(phase.client, Fold) and phase.client.sums
        turns = [
            (
                Task(at, client),
                reads.count(len(self.federations[order.run].indices(reads.source, client))),
            )
            for at, order in enumerate(orders)
            for client in order.cohort
        ]
        if apart:
            return [task._replace(batch=batch) for task, count in turns for batch in range(count)]
        return [task for task, _ in sorted(turns, key=lambda turn: turn[1], reverse=True)]

    def _crew_for(self, phase: Phase, tasks: int) -> "Crew":
        """The workers at hand, if they know the phase and are enough; else new ones."""
        size = min(self.workers or _cores(), tasks)
        known = _position(self._phases, phase) < len(self._phases)
        if self._crew is not None and known and self._crew.healthy(size):
            return self._crew
        size = max(size, len(self._crew.workers) if self._crew is not None else 0)
        self._dismiss()
        if not known:
            self._phases.append(phase)
        self._changed.clear()
        self._crew = Crew(size, self._hear, self._answer)
        return self._crew

    def _news(
        self, orders: Sequence[Order], tasks: Sequence[Task]
    ) -> dict[tuple[int, int], Groups | None]:
        """The memos of those who are asked, as far as the workers do not know them."""
        asked = {(orders[task.order].run, task.client) for task in tasks} & self._changed
        self._changed -= asked
        return {whose: self.memos.get(whose) for whose in asked}

    def _hear(self, brief: Brief) -> None:
        """In a worker: what has changed since it was forked."""
        for whose, memo in brief.news.items():
            if memo is None:
                self.memos.pop(whose, None)
            else:
                self.memos[whose] = memo

    def _answer(self, brief: Brief, task: Task) -> Answer:
        """In a worker: one client's turn, or a batch of it."""
        order, which = (
            brief.orders[task.order],
            ALL if task.batch is None else slice(task.batch, task.batch + 1),
        )
        memo = self.memos.get((order.run, task.client), self.first_memos[order.run])
        upload, after = self._ask(self._phases[brief.phase], order, task.client, memo, which)
        kept = retained(after, brief.retain)
        return Answer(
            upload,
            {name: None if group is memo.get(name) else group for name, group in kept.items()},
        )

    def _reply(self, phase: Phase, order: Order, turns: Sequence[Sequence[Answer]]) -> Reply:
        """In the engine's own process, in the order of the cohort: what every client keeps, and
        what the server gets.
        """
        for client, parts in zip(order.cohort, turns, strict=True):
            self._remember(order.run, client, parts[0].memo)
        federation = self.federations[order.run]
        examples = [len(federation.indices(phase.reads.source, client)) for client in order.cohort]
        uploads = [reduce(_plus, (part.upload for part in parts)) for parts in turns]
        stacked = {group: stack([upload[group] for upload in uploads]) for group in uploads[0]}
        return Reply(order.cohort, gather(phase, stacked, examples))

    def _remember(self, run: int, client: int, kept: dict[str, Any]) -> None:
        before = self.memos.get((run, client), self.first_memos[run])
        if set(kept) != set(before) or any(group is not None for group in kept.values()):
            self._changed.add((run, client))
        # copies: a view would hold on to the whole of the upload's memory
        new = {
            name: {n: t.clone() for n, t in group.items()}
            for name, group in kept.items()
            if group is not None
        }
        self.memos[run, client] = {name: new.get(name, before.get(name, {})) for name in kept}

    def _dismiss(self) -> None:
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.end()


def _plus(a: Groups, b: Groups) -> Groups:
    """Of one batch after another: as in a fold, to the bit."""
    return {group: combine(torch.add, tensors, b[group]) for group, tensors in a.items()}


def _channels_last(federation: Federation) -> Federation:
    """Images in channels_last. Every layer after them follows: convolutions and pooling run about
    half as long again without.

    Not contiguous(memory_format=...), which leaves images of one channel as they are.
    """
    step = Step(
        lambda x, key, stream: x.to(memory_format=torch.channels_last) if x.dim() == 4 else x
    )
    return replace(
        federation,
        transform=replace(federation.transform, steps=(*federation.transform.steps, step)),
    )


def _position(phases: Sequence[Phase], phase: Phase) -> int:
    """By identity: phases hold functions, and those are not compared."""
    return next((at for at, known in enumerate(phases) if known is phase), len(phases))


def _cores() -> int:
    return len(os.sched_getaffinity(0))
