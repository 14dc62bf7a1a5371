"""The engine for convolutions on a CPU: one process for each core, one thread in each process.

Images are in channels_last. Workers are forked, so they know everything that the engine knew at
that moment: the network, the data, the phases (closures, which pickle cannot carry) and the
clients' memos. They are forked again for each phase that they do not know; a method needs one fork
for each of its phases. Memos that have changed since the fork are sent before workers need them.
Traces of steps stay in the workers.

Weights and memos go to the workers, and uploads come back, in anonymous memory files (memfd). These
have no names in /dev/shm that could outlive the engine, need one open file at a time, and all
workers read the same memory pages.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from feddkd.data.federation import Federation
from feddkd.data.transforms import Step
from feddkd.engines.client import ALL, RunFold, retained
from feddkd.engines.compile.step_cache import FoldTracer
from feddkd.engines.interface import Order, Reply
from feddkd.engines.pool.workers import Answer, ClientTask, ExchangeInfo, Workers
from feddkd.engines.serial import Serial
from feddkd.errors import InputError
from feddkd.method import Exchange, Fold, Phase
from feddkd.tensors import Groups, combine


@dataclass
class Pool(Serial):
    """A serial engine whose clients are distributed to worker processes.

    By default there are as many workers as this process may use cores.
    """

    workers: int | None = None
    _phases: list[Phase] = field(default_factory=list, init=False, repr=False)
    # (run, client) whose memo is not the one that the workers know
    _changed: set[tuple[int, int]] = field(default_factory=set, init=False, repr=False)
    _processes: Workers | None = field(default=None, init=False, repr=False)
    # used in the workers only
    _tracer: FoldTracer = field(default_factory=FoldTracer, init=False, repr=False)

    def __post_init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise InputError(
                "engine 'pool' forks its workers and shares memory files with them: it needs Linux"
            )
        if device := next((f.device for f in self.federations if f.device.type != "cpu"), None):
            raise InputError(f"engine 'pool' computes on the CPU, and the data is on {device}")
        if self.workers is not None and self.workers < 1:
            raise InputError(f"engine 'pool' needs at least one worker, not {self.workers}")
        # float64 serves comparisons: its results must equal those of serial to the last bit
        if self.dtype != torch.float64:
            self.federations = [_channels_last(federation) for federation in self.federations]

    def exchange(self, exchange: Exchange, orders: Sequence[Order]) -> list[Reply]:
        tasks = self._longest_first(exchange.phase, orders)
        try:
            processes = self._workers_for(exchange.phase, len(tasks))
            phase = _position(self._phases, exchange.phase)
            changed = self._changed_memos(orders, tasks)
            info = ExchangeInfo(phase, exchange.retain, orders, changed)
            answers = processes.perform(info, tasks, exchange.phase.name)
        except BaseException:  # after an interrupt, too, no worker may stay behind
            self._stop_workers()
            raise
        parts: dict[tuple[int, int], list[Answer]] = {}
        for task in tasks:
            parts.setdefault((task.order, task.client), []).append(answers[task])
        return [
            self._reply(exchange.phase, order, [parts[number, client] for client in order.cohort])
            for number, order in enumerate(orders)
        ]

    def restore(self, run: int, memos: Mapping[int, Groups]) -> None:
        self._changed |= {owner for owner in self.memos if owner[0] == run}
        self._changed |= {(run, client) for client in memos}
        super().restore(run, memos)

    def close(self) -> None:
        self._stop_workers()
        super().close()

    @property
    def _fold_runner(self) -> RunFold:
        return self._tracer.run

    def _longest_first(self, phase: Phase, orders: Sequence[Order]) -> list[ClientTask]:
        """Return one task for each client, those with most batches first.

        A phase that only sums over batches, such as an evaluation, has one task for each batch.
        """
        reads = phase.reads
        tasks = []
        for number, order in enumerate(orders):
            for client in order.cohort:
                indices = self.federations[order.run].indices(reads.source, client)
                tasks.append((ClientTask(number, client), reads.count(len(indices))))
        if isinstance(phase.client, Fold) and phase.client.sums:
            return [task._replace(batch=batch) for task, count in tasks for batch in range(count)]
        return [task for task, _ in sorted(tasks, key=lambda item: item[1], reverse=True)]

    def _workers_for(self, phase: Phase, tasks: int) -> Workers:
        """Return the present workers if they know the phase and are enough, else new ones."""
        size = min(self.workers or len(os.sched_getaffinity(0)), tasks)
        known = _position(self._phases, phase) < len(self._phases)
        if self._processes is not None:
            if known and self._processes.are_alive(size):
                return self._processes
            size = max(size, len(self._processes.workers))
        self._stop_workers()
        if not known:
            self._phases.append(phase)
        self._changed.clear()
        self._processes = Workers(size, self._update_memos, self._compute)
        return self._processes

    def _changed_memos(
        self, orders: Sequence[Order], tasks: Sequence[ClientTask]
    ) -> dict[tuple[int, int], Groups | None]:
        """Return the memos of the tasks' clients that the workers do not know yet."""
        asked = {(orders[task.order].run, task.client) for task in tasks} & self._changed
        self._changed -= asked
        return {owner: self.memos.get(owner) for owner in asked}

    def _update_memos(self, info: ExchangeInfo) -> None:
        """In a worker: take over the memos that have changed since it was forked."""
        for owner, memo in info.changed_memos.items():
            if memo is None:
                self.memos.pop(owner, None)
            else:
                self.memos[owner] = memo

    def _compute(self, info: ExchangeInfo, task: ClientTask) -> Answer:
        """In a worker: return the answer of one client, or of one of its batches."""
        order = info.orders[task.order]
        which = ALL if task.batch is None else slice(task.batch, task.batch + 1)
        memo = self.memo(order.run, task.client)
        upload, after = self._ask(self._phases[info.phase], order, task.client, memo, which)
        kept: dict[str, Any] = {}
        for name, group in retained(after, info.retain).items():
            kept[name] = None if group is memo.get(name) else group
        return Answer(upload, kept)

    def _reply(self, phase: Phase, order: Order, answers: Sequence[Sequence[Answer]]) -> Reply:
        """In the engine's process: keep the memos and gather the uploads, in cohort order."""
        for client, parts in zip(order.cohort, answers, strict=True):
            self._keep(order.run, client, parts[0].memo)
        uploads = [reduce(_plus, (part.upload for part in parts)) for parts in answers]
        return self._gathered(phase, order, uploads)

    def _keep(self, run: int, client: int, kept: dict[str, Any]) -> None:
        before = self.memo(run, client)
        if set(kept) != set(before) or any(group is not None for group in kept.values()):
            self._changed.add((run, client))
        memo: dict[str, Mapping[str, Tensor]] = {}
        for name, group in kept.items():
            if group is None:
                memo[name] = before.get(name, {})
            else:  # copies: a view would keep the memory of the whole upload
                memo[name] = {key: tensor.clone() for key, tensor in group.items()}
        self.memos[run, client] = memo

    def _stop_workers(self) -> None:
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.stop()


def _plus(a: Groups, b: Groups) -> Groups:
    """Return the sum of two uploads; summed batch after batch it equals a fold to the last bit."""
    return {group: combine(torch.add, tensors, b[group]) for group, tensors in a.items()}


def _channels_last(federation: Federation) -> Federation:
    """Return the federation with images in channels_last.

    Every layer after them follows. Without it, convolutions and pooling take about 1.5 times as
    long. contiguous(memory_format=...) would not do: it leaves images of one channel unchanged.
    """
    if not isinstance(federation.x, Tensor):
        return federation
    step = Step(
        lambda x, key, stream: x.to(memory_format=torch.channels_last) if x.dim() == 4 else x
    )
    steps = (*federation.transform.steps, step)
    return replace(federation, transform=replace(federation.transform, steps=steps))


def _position(phases: Sequence[Phase], phase: Phase) -> int:
    """Return the position of a phase, or the length of the list if it is not there.

    Phases are compared by identity, since they hold functions.
    """
    return next((n for n, other in enumerate(phases) if other is phase), len(phases))
