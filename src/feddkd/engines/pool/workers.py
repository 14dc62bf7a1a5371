"""Worker processes:

forked, told what to do, watched, ended. The tasks they are given and the answers they give.
"""

import ctypes
import gc
import importlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch

from feddkd.engines.interface import Order
from feddkd.engines.pool.messages import Pipe, close, pack, receive, send
from feddkd.errors import ClientError, InputError
from feddkd.tensors import Groups


class Task(NamedTuple):
    """One client's turn: the number of its order in the exchange, and its own; or one of its
    batches alone.
    """

    order: int
    client: int
    batch: int | None = None


class Brief(NamedTuple):
    """What workers must be told of an exchange. Phases they know, by number."""

    phase: int
    retain: frozenset[str] | None
    orders: Sequence[Order]
    # (run, client) -> memo, where they know another; None: it has none
    news: Mapping[tuple[int, int], Groups | None]


class Answer(NamedTuple):
    """A client's upload, and the memo groups it keeps: None stands for a group as it was."""

    upload: Groups
    memo: dict[str, Any]


class Failure(NamedTuple):
    error: Exception
    trace: str


class Worker(NamedTuple):
    process: BaseProcess
    pipe: Pipe


class Crew:
    """Forked processes that hear briefs and answer tasks until they are ended."""

    def __init__(
        self, size: int, hear: Callable[[Brief], None], answer: Callable[[Brief, Task], Answer]
    ) -> None:
        # torch.func imports hundreds of modules at its first call (1.5 s): here once, not in every
        # worker
        importlib.import_module("torch._dynamo")
        self.workers: list[Worker] = []
        pipes = [multiprocessing.Pipe() for _ in range(size)]
        context = multiprocessing.get_context("fork")
        try:
            for ours, theirs in pipes:
                others = [end for pair in pipes for end in pair if end is not theirs]
                process = context.Process(
                    target=_work, args=(theirs, others, os.getpid(), hear, answer), daemon=True
                )
                # of threads that do not survive a fork: see _settle
                with warnings.catch_warnings(action="ignore"):
                    process.start()
                self.workers.append(Worker(process, ours))
        except BaseException:
            self.end()
            raise
        finally:
            for _, theirs in pipes:
                theirs.close()

    def healthy(self, size: int) -> bool:
        return len(self.workers) >= size and all(
            worker.process.is_alive() for worker in self.workers
        )

    def perform(self, brief: Brief, tasks: Sequence[Task], phase: str) -> dict[Task, Answer]:
        """Every task's answer. Whoever is free gets the next task."""
        waiting, busy, answers = list(reversed(tasks)), dict[int, Task](), dict[Task, Answer]()
        free = list(range(min(len(self.workers), len(tasks))))
        # all of them: who has nothing to do now will need the news another time
        self._tell(range(len(self.workers)), brief)
        while waiting or busy:
            while waiting and free:
                at = free.pop()
                busy[at] = waiting.pop()
                self._tell([at], busy[at])
            for at in self._ready(busy):
                answers[busy[at]] = self._fetch(at, busy[at], brief, phase)
                del busy[at]
                free.append(at)
        return answers

    def _tell(self, workers: Sequence[int], message: Brief | Task) -> None:
        header, memory = pack(message)
        try:
            for at in workers:
                # of a dead worker: _fetch will tell
                with suppress(BrokenPipeError, ConnectionResetError):
                    send(self.workers[at].pipe, header, memory)
        finally:
            close(memory)

    def _ready(self, busy: dict[int, Task]) -> list[int]:
        """Busy workers that have answered or died."""
        ready = wait(
            [
                thing
                for at in busy
                for thing in (self.workers[at].pipe, self.workers[at].process.sentinel)
            ]
        )
        return [
            at
            for at in busy
            if self.workers[at].pipe in ready or self.workers[at].process.sentinel in ready
        ]

    def _fetch(self, at: int, task: Task, brief: Brief, phase: str) -> Answer:
        process, pipe = self.workers[at]
        try:
            answer = receive(pipe)
        except (EOFError, OSError):
            process.join(1)
            key = (*brief.orders[task.order].key, task.client)
            raise ClientError(
                f"client {task.client} failed in phase {phase!r}, key {key}: its worker process"
                f" {process.pid} {_fate(process.exitcode)}"
            ) from None
        if isinstance(answer, Failure):
            raise answer.error from RuntimeError(
                f"in worker process {process.pid}:\n{answer.trace}"
            )
        assert isinstance(answer, Answer)
        return answer

    def end(self) -> None:
        """By SIGKILL: workers hold nothing that would need putting in order."""
        for process, pipe in self.workers:
            process.kill()
            process.join()
            process.close()
            pipe.close()
        self.workers = []


def _fate(exitcode: int | None) -> str:
    if exitcode is None:
        return "broke off its answer"
    if exitcode >= 0:
        return f"ended (exit status {exitcode})"
    fate = f"was ended by {signal.Signals(-exitcode).name}"
    return f"{fate}, perhaps for want of memory" if exitcode == -signal.SIGKILL else fate


# --- in a worker


def _work(
    pipe: Pipe,
    others: Sequence[Pipe],
    parent: int,
    hear: Callable[[Brief], None],
    answer: Callable[[Brief, Task], Answer],
) -> None:
    """The life of a worker. It never returns into the program of which it is a copy."""
    try:
        _settle(others, parent)
        while True:
            message = receive(pipe)
            if isinstance(message, Brief):
                brief = message
                hear(brief)
                continue
            header, memory = pack(_outcome(answer, brief, message))
            send(pipe, header, memory)
            close(memory)
    finally:
        os._exit(1)


def _outcome(answer: Callable[[Brief, Task], Answer], brief: Brief, task: Task) -> Answer | Failure:
    try:
        return answer(brief, task)
    except Exception as error:  # only its text is sure to survive the way to the engine
        kind = InputError if isinstance(error, InputError) else ClientError
        return Failure(kind(str(error)), traceback.format_exc())


def _settle(others: Sequence[Pipe], parent: int) -> None:
    # the engine sees the interrupt and ends its workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever the program does about it
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    for other in others:
        other.close()  # so that a pipe breaks when its worker dies
    # before anything is computed: OpenMP's threads do not survive a fork but would be waited for
    torch.set_num_threads(1)
    gc.freeze()  # to collect what is the engine's would only copy its pages
    _keep_memory()


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def _keep_memory() -> None:
    """Freed memory stays with the process. By default glibc gives every large activation back to
    the kernel and takes it anew, zeroed page by page, in the next step: a third of the time of a
    small convolutional network.
    """
    m_trim_threshold, m_mmap_max = -1, -4
    with suppress(AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 1 << 30)
