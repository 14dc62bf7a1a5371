"""Which way of carrying out a step over many lanes is quickest here.

vmap     one vectorised program, launched step by step
traced   the same, traced once: what is launched is tensor operations alone
loop     lane after lane, for networks that vmap cannot take and for convolutions on a CPU
graph    the vectorised step recorded once as a CUDA graph and replayed
streams  every lane on a CUDA stream of its own, all of them recorded as one CUDA graph
fused, fused-streams
         the same two, traced (convolutions over lanes as patches x bmm) and compiled before they
         are recorded
kernels  as fused, with convolutions, and the pooling and ReLU behind them, in Triton kernels of our own

All give the same numbers up to rounding. `auto` times some steps of the job at hand and keeps the
quickest.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from feddkd.engines.batched.folds import Walk, Work, lanes_in, run_loop, run_vmap
from feddkd.engines.batched.memory import ran_out
from feddkd.engines.compile.cuda_folds import Recordings, Way
from feddkd.engines.compile.step_cache import Traces
from feddkd.errors import InputError, choices
from feddkd.tensors import Groups

log = logging.getLogger(__name__)
ENOUGH = 0.03  # seconds that a trial should take: many steps where they are short
PATIENCE = 1.0  # seconds of a trial that is not repeated
REPEATS = 4
HOPELESS = 3.0  # times the best so far: no further trial
WAYS = {
    "graph": Way(),
    "streams": Way(streams=True),
    "fused": Way(compiled=True),
    "fused-streams": Way(streams=True, compiled=True),
    "kernels": Way(compiled=True, kernels=True),
}


T = TypeVar("T")
Trial = Callable[[str, int], object]  # carries out so many steps by the strategy of that name


class Chooser:
    """Runs folds by a named strategy, or by the one that was quickest on a few steps of the same
    kind of work.
    """

    def __init__(self, strategy: str, device: torch.device) -> None:
        known: tuple[str, ...] = (
            ("loop", "vmap", *WAYS) if device.type == "cuda" else ("loop", "vmap", "traced")
        )
        if strategy not in ("auto", *known):
            raise InputError(
                f"unknown strategy {strategy!r} on {device.type}; there are: auto, {choices(known)}"
            )
        self.strategy, self.known, self.device = strategy, known, device
        self.chosen: dict[str, str] = {}  # what kind of work -> strategy
        self.failed: dict[str, str] = {}  # what kind of work -> why the loop took over
        self.proven: set[str] = set()  # kinds of work that have been carried out
        self.recordings = Recordings()
        self.traces = Traces()

    @property
    def fuses(self) -> bool:
        """Whether compiling was found to pay."""
        return any(name in WAYS and WAYS[name].compiled for name in self.chosen.values())

    def run(self, work: Work, carry: Groups) -> Groups:
        trains = work.phase.reads.random
        # a test set is read through too seldom for compiling or tracing to pay, and not worth a
        # line to people
        known = self.known if trains else [name for name in self.known if name != "traced"]
        names = [name for name in known if name not in WAYS or WAYS[name].suits(work.model, trains)]
        kind = f"{work.phase.name}, {lanes_in(carry)} lanes of {work.tape.indices.shape[2]}"
        # a trial ends with the first lane that does
        most = work.tape.active.count(work.tape.active[0])
        level = logging.INFO if trains else logging.DEBUG
        name = self.pick(
            kind,
            names,
            lambda name, steps: self._runner(name)(work, carry, steps),
            most,
            level=level,
        )
        return self.by(
            kind,
            name,
            lambda name: self._runner("vmap" if name == "traced" and not trains else name)(
                work, carry, None
            ),
        )

    def by(self, kind: str, name: str, work: Callable[[str], T]) -> T:
        """Return what is computed by the strategy of that name, or by the loop where that does not
        work at its first use.
        """
        try:
            result = work(name)
        except InputError:
            raise
        except Exception as error:
            if name == "loop" or kind in self.proven or ran_out(error):
                raise
            self.chosen[kind], self.failed[kind] = "loop", f"{name}: {_first_line(error)}"
            log.warning(
                "%s: %s does not work for this network (%s); its clients are computed one after"
                " another, by 'loop', which takes about as long as engine 'serial'",
                kind,
                name,
                _first_line(error),
            )
            result = work("loop")
        self.proven.add(kind)
        return result

    def close(self) -> None:
        self.recordings.clear()
        self.traces.clear()

    def _runner(self, name: str) -> Callable[[Work, Groups, int | None], Groups]:
        if name in WAYS:
            return lambda work, carry, steps: self.recordings.run(work, carry, steps, WAYS[name])
        if name == "traced":
            return lambda work, carry, steps: run_vmap(work, carry, steps, self._traced)
        return {"vmap": run_vmap, "loop": run_loop}[name]

    def _traced(self, work: Work) -> Walk:
        """Traced anew for another client or inputs of other shapes."""
        return partial(self.traces.walk, (work.client, work.shared, work.shapes), work.many)

    def pick(
        self,
        kind: str,
        names: Sequence[str],
        trial: Trial,
        most: int = 1,
        per: int = 1,
        level: int = logging.INFO,
    ) -> str:
        """The strategy for this kind of work: the one asked for, or the quickest of those named in
        trials of at most so many steps. `per`: how many steps one of the trial's counts for in the
        log.
        """
        if kind not in self.chosen:
            if self.strategy == "auto":
                seconds = self._try(kind, names, trial, most)
                self.chosen[kind] = min(seconds, key=lambda name: seconds[name])
                times = ", ".join(
                    f"{name} {1e3 * each / per:.3g}" for name, each in seconds.items()
                )
                log.log(level, "%s: %s (ms a step: %s)", kind, self.chosen[kind], times)
            else:
                self.chosen[kind] = self.strategy
                log.log(level, "%s: %s, as asked", kind, self.strategy)
        return self.chosen[kind]

    def _try(self, kind: str, names: Sequence[str], trial: Trial, most: int) -> dict[str, float]:
        """Name -> seconds a step, the least of some trials, for those that work."""
        seconds: dict[str, float] = {}
        for name in names:
            try:
                prepares = name in WAYS or name == "traced"
                seconds[name] = self._first(
                    partial(trial, name), min(seconds.values(), default=0.0), prepares
                )
            except InputError:
                raise
            except Exception as error:
                if name == "loop":  # not the strategy's fault: the client itself fails
                    raise
                log.warning(
                    "%s: %s does not work for this network (%s)", kind, name, _first_line(error)
                )
        # by turns, so that whatever else the machine does meets all of them alike
        for _ in range(REPEATS):
            best = min(seconds.values())
            for name in [name for name in seconds if seconds[name] < HOPELESS * best]:
                steps = max(1, min(most, round(ENOUGH / seconds[name])))
                if steps * seconds[name] < PATIENCE:
                    seconds[name] = min(seconds[name], self._clock(partial(trial, name), steps))
        return seconds

    def _first(self, trial: Callable[[int], object], best: float, prepares: bool) -> float:
        """A first impression, after warming up; that itself will do where it took far too long and
        nothing was recorded or traced in it, which on a busy machine takes seconds.
        """
        warm = self._clock(trial, 1)
        return (
            warm
            if warm > max(HOPELESS * best, HOPELESS * PATIENCE) and not prepares and best
            else self._clock(trial, 1)
        )

    def _clock(self, trial: Callable[[int], object], steps: int) -> float:
        wait_for(self.device)
        began = time.perf_counter()
        trial(steps)
        wait_for(self.device)
        return (time.perf_counter() - began) / steps


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
