"""The ways to compute a step over many lanes.

loop     lane after lane: it needs no preparation and takes any network
vmap     one vectorised program, launched step by step
traced   the same, traced once: only tensor operations are launched
graph    the vectorised step, recorded once as a CUDA graph and replayed
streams  each lane on a separate CUDA stream, all recorded as one CUDA graph
fused, fused-streams
         the same two, traced (convolutions over lanes as patches x bmm) and compiled before they
         are recorded
kernels  as fused; convolutions, with the pooling and ReLU that follow them, are Triton kernels

All give the same numbers up to rounding. `auto` begins with the first one that works and changes to
a faster one when a trial has found it (choices.py).
"""

import gc
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch

from feddkd.engines.batched.choices import Choice, adopted
from feddkd.engines.batched.folds import RunLanes, Work, lanes_in, run_loop, run_vmap, shapes
from feddkd.engines.choice_cache import digest_of, limit_programs
from feddkd.engines.compile.cuda_folds import GraphOptions, Recordings
from feddkd.engines.compile.step_cache import TracedSteps
from feddkd.engines.memory import ran_out
from feddkd.errors import InputError, unknown
from feddkd.tensors import Groups

log = logging.getLogger(__name__)
PIECE_SECONDS = 1.0  # while strategies are left to try, a longer exchange is computed in pieces
GRAPHS = {
    "graph": GraphOptions(),
    "streams": GraphOptions(streams=True),
    "fused": GraphOptions(compiled=True),
    "fused-streams": GraphOptions(streams=True, compiled=True),
    "kernels": GraphOptions(compiled=True, kernels=True),
}


T = TypeVar("T")
Trial = Callable[[str, int], object]  # (strategy, steps): compute some steps by the strategy


class StrategyChooser:
    """Runs work by a named strategy, or by the fastest one that has been found for its kind."""

    def __init__(self, strategy: str, device: torch.device, identity: object = None) -> None:
        on_gpu = device.type == "cuda"
        names: tuple[str, ...] = ("loop", "vmap", *(GRAPHS if on_gpu else ("traced",)))
        if strategy not in ("auto", *names):
            problem = f"unknown strategy {strategy!r} on {device.type}"
            raise unknown(problem, strategy, ("auto", *names))
        self.strategy, self.names, self.device = strategy, names, device
        self.identity = identity  # of the network and the machine, for the cache
        self.round = 0
        self.choices: dict[str, Choice] = {}  # by kind of work
        self.failed: dict[str, str] = {}  # kind of work -> why the loop replaced the strategy
        self.succeeded: set[tuple[str, str]] = set()  # (kind of work, strategy) that has worked
        self.recordings = Recordings()
        self.traced = TracedSteps()

    @property
    def chosen(self) -> dict[str, str]:
        """The present strategy for each kind of work."""
        return {kind: choice.name for kind, choice in self.choices.items()}

    @property
    def compiles(self) -> bool:
        """True if a compiled strategy was the fastest for some kind of work."""
        return any(name in GRAPHS and GRAPHS[name].compiled for name in self.chosen.values())

    def facts(self) -> dict[str, Any]:
        """Return the choices, and what a resumed run needs to go on in the same way."""
        changes = {kind: choice.since for kind, choice in self.choices.items() if choice.since}
        tried = {
            kind: {name: choice.seconds.get(name, 0.0) for name in sorted(choice.tried)}
            for kind, choice in self.choices.items()
        }
        facts: dict[str, Any] = {"strategy": self.chosen}
        if self.strategy == "auto":
            facts |= {"since": changes, "tried": tried}
        return {**facts, "failed": dict(self.failed)} if self.failed else facts

    def adopt(self, facts: Any) -> None:
        """Repeat recorded choices."""
        # a record from another device may name strategies that do not exist here
        for kind, name in facts.get("strategy", {}).items():
            if name in self.names:
                tried = facts.get("tried", {}).get(kind)
                self.choices[kind] = adopted(name, tried, self.names)
                self.choices[kind].since = list(map(tuple, facts.get("since", {}).get(kind, ())))

    def run(self, work: Work, carry: Groups) -> Groups:
        """Return the carry after a fold, by the strategy for this kind of work."""
        trains = work.phase.reads.random
        # an evaluation reads its examples too seldom for compiling or tracing, or for a log line
        names = [
            name
            for name in self.names
            if (trains or name != "traced")
            and (name not in GRAPHS or GRAPHS[name].suits(work.model, trains))
        ]
        kind = f"{work.phase.name}, {lanes_in(carry)} lanes of {work.table.indices.shape[2]}"
        key = shapes(work.sent), shapes(carry)
        while True:
            steps = self._piece(kind, names, len(work.table.active))
            most = work.table.active.count(work.table.active[0])
            carry = self.compute(
                kind,
                names,
                partial(self._run, work, carry, steps),
                partial(self._trial, work, carry),
                key=key,
                most=most,  # a trial ends before the first lane finishes
                steps=steps or len(work.table.active),
                level=logging.INFO if trains else logging.DEBUG,
            )
            if steps is None:
                return carry
            work = work.after(steps)

    def _run(self, work: Work, carry: Groups, steps: int | None, name: str) -> Groups:
        if name in GRAPHS:
            return self.recordings.run(work, carry, steps, GRAPHS[name])
        if name == "traced" and work.phase.reads.random:
            return run_vmap(work, carry, steps, self._traced_program)
        return (run_loop if name == "loop" else run_vmap)(work, carry, steps)

    def _trial(self, work: Work, carry: Groups, name: str, steps: int) -> None:
        self._run(work, carry, steps, name)

    def _piece(self, kind: str, names: Sequence[str], steps: int) -> int | None:
        """Return the steps until a strategy may be tried again; None for all."""
        choice = self.choices.get(kind)
        if self.strategy != "auto" or (choice and not choice.left(names) and not choice.known):
            return None
        seconds = choice.seconds.get(choice.name) if choice else None
        # the first step of a kind of work says how long the others take
        piece = max(1, int(PIECE_SECONDS / max(seconds, 1e-9))) if seconds else 1
        return piece if piece < steps else None

    def compute(
        self,
        kind: str,
        names: Sequence[str],
        run: Callable[[str], T],
        trial: Trial,
        *,
        key: object = None,
        most: int = 1,
        steps: float = 1,
        level: int = logging.INFO,
    ) -> T:
        """Return the result of some work by the strategy for its kind.

        `trial` computes at most `most` steps again; `steps` is the number of steps of the work. Of
        `names`, those that are left may be tried before.
        """
        choice = self.choices.get(kind) or self._begin(kind, names, key, level)
        if self.strategy == "auto":
            self._consider(kind, choice, names, trial, most, level)
        pending = self.strategy == "auto" and bool(choice.known or choice.left(names))
        if pending:
            wait_for(self.device)
        began = time.perf_counter()
        result = self._run_or_loop(kind, choice, run)
        if pending:
            wait_for(self.device)
            choice.ran(time.perf_counter() - began, steps)
        return result

    def _begin(self, kind: str, names: Sequence[str], key: object, level: int) -> Choice:
        if self.strategy != "auto":
            choice = Choice("", self.strategy)
            log.log(level, "%s: %s, as asked", kind, self.strategy)
        else:
            # the GPU is faster than the launches of a loop
            start = "vmap" if self.device.type == "cuda" and "vmap" in names else names[0]
            choice = Choice.first(digest_of(self.identity, kind, key), names, start)
            log.log(level, "%s: begins with %s", kind, choice.known or start)
        self.choices[kind] = choice
        return choice

    def _consider(
        self, kind: str, choice: Choice, names: Sequence[str], trial: Trial, most: int, level: int
    ) -> None:
        """Take the strategy that the cache knows, or try another one, if it is time for that."""
        if choice.is_known_due():
            choice.switch(str(choice.known), self.round)
            return
        name = None if choice.known else choice.due(names)
        if name is not None:
            self._try(kind, choice, name, trial, most)
            if name in choice.seconds and choice.faster(name):
                milliseconds = f"{1e3 * choice.seconds[name]:.3g} for"
                milliseconds += f" {1e3 * choice.seconds[choice.name]:.3g}"
                log.log(level, "%s: from round %d on %s", kind, self.round, name)
                log.log(level, "%s: %s ms a step", kind, milliseconds)
                choice.switch(name, self.round)
            self._drop_unused()
            if not choice.left(names):
                choice.keep()

    def _try(self, kind: str, choice: Choice, name: str, trial: Trial, most: int) -> None:
        """Compare a strategy with the present one; a failed trial leaves nothing behind."""
        began, error = time.perf_counter(), None
        try:
            prepared = name in GRAPHS or name == "traced"
            choice.compare(name, partial(self._time, trial), most, prepared)
        except InputError:
            raise
        except Exception as failure:
            if name == "loop":  # the client fails, not the strategy
                raise
            error = first_line(failure)
        if error is not None:  # outside of `except`: there the failure still holds tensors
            log.warning("%s: %s does not work for this network (%s)", kind, name, error)
            self._forget(name)
        choice.costs[name] = time.perf_counter() - began
        choice.trials += choice.costs[name]

    def _time(self, trial: Trial, name: str, steps: int) -> float:
        """Return the seconds of a step."""
        wait_for(self.device)
        began = time.perf_counter()
        trial(name, steps)
        wait_for(self.device)
        return (time.perf_counter() - began) / steps

    def _run_or_loop(self, kind: str, choice: Choice, run: Callable[[str], T]) -> T:
        """Return the result by the present strategy, or by the loop if its first use fails."""
        name, problem = choice.name, ""
        try:
            result = run(name)
        except InputError:
            raise
        except Exception as error:
            if name == "loop" or (kind, name) in self.succeeded or ran_out(error):
                raise
            problem = first_line(error)
        if problem:
            self._forget(name)
            choice.tried.add(name)
            choice.switch("loop", self.round)
            self.failed[kind] = f"{name}: {problem}"
            log.warning(
                "%s: %s does not work for this network (%s); its clients are computed one after"
                " another, by 'loop', which takes about as long as engine 'serial'",
                kind,
                name,
                problem,
            )
            result = run("loop")
        self.succeeded.add((kind, choice.name))
        return result

    def _forget(self, name: str) -> None:
        """Free what a failed strategy has made."""
        if name in GRAPHS:
            self.recordings.forget(GRAPHS[name])
            if GRAPHS[name].compiled:
                torch.compiler.reset()
        elif name == "traced":
            self.traced.clear()
        gc.collect()
        if self.device.type == "cuda":
            with suppress(RuntimeError):
                torch.cuda.synchronize(self.device)
                torch.cuda.empty_cache()

    def _drop_unused(self) -> None:
        """Free the recordings of strategies that lost their trials."""
        used = set(self.chosen.values())
        for name, options in GRAPHS.items():
            if name not in used:
                self.recordings.forget(options)

    def clear(self) -> None:
        """Free recordings and traces; the choices stay."""
        self.recordings.clear()
        self.traced.clear()

    def close(self) -> None:
        """Free everything, and keep what the trials have taught."""
        if self.strategy == "auto":
            for choice in self.choices.values():
                if choice.digest:
                    choice.keep()
        if self.compiles:
            limit_programs()
        self.clear()

    def _traced_program(self, work: Work) -> RunLanes:
        """Return a traced program; another client half or other shapes have another trace."""
        return partial(self.traced.run, (work.client, work.shared, work.shapes), work.lane_step)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
