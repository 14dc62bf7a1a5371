"""Worker processes: started, given tasks, watched and stopped."""

import ctypes
import gc
import importlib
import logging
import multiprocessing
import os
import signal
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch

from feddkd.engines.interface import Order
from feddkd.engines.pool.messages import Pipe, close, pack, receive, send
from feddkd.errors import ClientError, InputError
from feddkd.process_lock import PROCESS_LOCK
from feddkd.tensors import Groups

log = logging.getLogger(__name__)
# a task whose workers die this many times ends the run: it may need more memory than there is
MOST_DEATHS = 3


class ClientTask(NamedTuple):
    """The work of one client, or one of its batches."""

    order: int  # the number of its order in the exchange
    client: int
    batch: int | None = None


class ExchangeInfo(NamedTuple):
    """The part of an exchange that all workers need."""

    phase: int  # the number of a phase that the workers know
    retain: frozenset[str] | None
    orders: Sequence[Order]
    # (run, client) -> memo, if the workers know another one; None: the client has no memo
    changed_memos: Mapping[tuple[int, int], Groups | None]


class Answer(NamedTuple):
    """A client's upload, and the memo groups it keeps: None stands for an unchanged group."""

    upload: Groups
    memo: dict[str, Any]


class Failure(NamedTuple):
    """An error in a worker, and its traceback as text."""

    error: Exception
    trace: str


class Worker(NamedTuple):
    """A worker process and the engine's end of its pipe."""

    process: BaseProcess
    pipe: Pipe


UpdateMemos = Callable[[ExchangeInfo], None]
Compute = Callable[[ExchangeInfo, ClientTask], Answer]


class Workers:
    """Forked processes that compute tasks until they are stopped."""

    def __init__(self, size: int, update_memos: UpdateMemos, compute: Compute) -> None:
        # torch.func imports hundreds of modules at its first call (1.5 s): import them once here,
        # not in every worker
        importlib.import_module("torch._dynamo")
        self.workers: list[Worker] = []
        self._functions = update_memos, compute
        try:
            for _ in range(size):
                self.workers.append(self._forked())
        except BaseException:
            self.stop()
            raise

    def _forked(self) -> Worker:
        """Fork a worker; it knows what this process knows now."""
        with PROCESS_LOCK:
            ours, theirs = multiprocessing.Pipe()
            others = [ours, *(worker.pipe for worker in self.workers)]
            context, inputs = multiprocessing.get_context("fork"), (theirs, others, os.getpid())
            try:
                process = context.Process(
                    target=_worker_main, args=(*inputs, *self._functions), daemon=True
                )
                # Python warns about threads that do not survive a fork: see _prepare
                with warnings.catch_warnings(action="ignore"):
                    process.start()
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
        return Worker(process, ours)

    def are_alive(self, size: int) -> bool:
        """Return whether there are at least `size` workers and all of them are alive."""
        return len(self.workers) >= size and all(
            worker.process.is_alive() for worker in self.workers
        )

    def perform(
        self, info: ExchangeInfo, tasks: Sequence[ClientTask], phase: str
    ) -> dict[ClientTask, Answer]:
        """Return the answer of every task. A worker that is free gets the next task.

        A worker that dies is replaced, and its task is computed again: the draws follow the same
        keys.
        """
        waiting, deaths = list(reversed(tasks)), Counter[ClientTask]()
        busy: dict[int, ClientTask] = {}  # worker -> its task
        answers: dict[ClientTask, Answer] = {}
        free = list(range(min(len(self.workers), len(tasks))))
        # to all of them: a worker without a task now needs the memos in a later exchange
        self._send(range(len(self.workers)), info)
        while waiting or busy:
            while waiting and free:
                number = free.pop()
                busy[number] = waiting.pop()
                self._send([number], busy[number])
            for number in self._ready(busy):
                task = busy.pop(number)
                try:
                    answers[task] = self._receive(number)
                except (EOFError, OSError):
                    deaths[task] += 1
                    self._replace(number, task, info, phase, last=deaths[task] == MOST_DEATHS)
                    waiting.append(task)
                free.append(number)
        return answers

    def _send(self, numbers: Sequence[int], message: ExchangeInfo | ClientTask) -> None:
        header, memory = pack(message)
        try:
            for number in numbers:
                # raised if the worker is dead: _receive reports it
                with suppress(BrokenPipeError, ConnectionResetError):
                    send(self.workers[number].pipe, header, memory)
        finally:
            close(memory)

    def _ready(self, busy: Mapping[int, ClientTask]) -> list[int]:
        """Wait until busy workers have answered or died, and return their numbers."""
        pipes = {number: self.workers[number].pipe for number in busy}
        ends = {number: self.workers[number].process.sentinel for number in busy}
        ready = wait([*pipes.values(), *ends.values()])
        return [n for n in busy if pipes[n] in ready or ends[n] in ready]

    def _receive(self, number: int) -> Answer:
        """Return a worker's answer; raise the error that it met, or an EOFError if it is dead."""
        process, pipe = self.workers[number]
        answer = receive(pipe)
        if isinstance(answer, Failure):
            raise answer.error from RuntimeError(
                f"in worker process {process.pid}:\n{answer.trace}"
            )
        assert isinstance(answer, Answer)
        return answer

    def _replace(
        self, number: int, task: ClientTask, info: ExchangeInfo, phase: str, last: bool
    ) -> None:
        """Put a new worker in the place of a dead one; raise a ClientError if this was the `last`
        attempt to compute the task.
        """
        process = self.workers[number].process
        process.join(1)
        end = f"its worker process {process.pid} {_end_of(process.exitcode)}"
        if last:
            key = (*info.orders[task.order].key, task.client)
            raise ClientError(f"client {task.client} failed in phase {phase!r}, key {key}: {end}")
        log.warning("client %d in phase %r: %s; it is computed again", task.client, phase, end)
        _end(self.workers[number])
        self.workers[number] = self._forked()
        self._send([number], info)

    def stop(self) -> None:
        """End the workers by SIGKILL: they hold nothing that needs to be saved."""
        for worker in self.workers:
            _end(worker)
        self.workers = []


def _end(worker: Worker) -> None:
    """End a worker and close what this process holds of it."""
    with PROCESS_LOCK:
        worker.process.kill()
        worker.process.join()
        worker.process.close()
    worker.pipe.close()


def _end_of(exitcode: int | None) -> str:
    """Return in words how a worker process ended."""
    if exitcode is None:
        return "sent an incomplete answer"
    if exitcode >= 0:
        return f"ended (exit status {exitcode})"
    name = signal.Signals(-exitcode).name
    reason = ", perhaps because memory ran out" if exitcode == -signal.SIGKILL else ""
    return f"was ended by {name}{reason}"


# --- in a worker


def _worker_main(
    pipe: Pipe, others: Sequence[Pipe], parent: int, update_memos: UpdateMemos, compute: Compute
) -> None:
    """Compute tasks for ever; the process never returns into the program that was forked."""
    try:
        _prepare(others, parent)
        while True:
            message = receive(pipe)
            if isinstance(message, ExchangeInfo):
                info = message
                update_memos(info)
                continue
            header, memory = pack(_answer_or_failure(compute, info, message))
            send(pipe, header, memory)
            close(memory)
    finally:
        os._exit(1)


def _answer_or_failure(compute: Compute, info: ExchangeInfo, task: ClientTask) -> Answer | Failure:
    try:
        return compute(info, task)
    except Exception as error:  # of an error only the text can always be pickled
        kind = InputError if isinstance(error, InputError) else ClientError
        return Failure(kind(str(error)), traceback.format_exc())


def _prepare(others: Sequence[Pipe], parent: int) -> None:
    """Set up signals, pipes, threads and memory of a new worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine sees it and ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the handler of the forked program
    threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()
    for other in others:
        other.close()  # so that a pipe breaks when its worker dies
    # before anything is computed: the threads of OpenMP do not survive a fork, and it would wait
    # for them
    torch.set_num_threads(1)
    gc.freeze()  # to collect the engine's objects would only copy their memory pages
    _keep_memory()


def _exit_after(parent: int) -> None:
    """Exit when the parent process has ended."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def _keep_memory() -> None:
    """Make the process keep freed memory.

    By default glibc returns every large activation to the kernel, and in the next step gets the
    memory again with every page set to zero: a third of the time of a small convolutional network.
    """
    m_trim_threshold, m_mmap_max = -1, -4
    with suppress(AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 1 << 30)
