"""The ways to compute a step over many lanes, and the choice of the fastest.

vmap     one vectorised program, launched step by step
traced   the same, traced once: only tensor operations are launched
loop     lane after lane, for networks that vmap cannot take and for convolutions on a CPU
graph    the vectorised step, recorded once as a CUDA graph and replayed
streams  each lane on a separate CUDA stream, all recorded as one CUDA graph
fused, fused-streams
         the same two, traced (convolutions over lanes as patches x bmm) and compiled before they
         are recorded
kernels  as fused; convolutions, with the pooling and ReLU that follow them, are Triton kernels

All give the same numbers up to rounding. `auto` times some steps of the present work and takes the
fastest strategy.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from feddkd.engines.batched.folds import RunLanes, Work, lanes_in, run_loop, run_vmap
from feddkd.engines.compile.cuda_folds import GraphOptions, Recordings
from feddkd.engines.compile.step_cache import TracedSteps
from feddkd.engines.memory import ran_out
from feddkd.errors import InputError, unknown
from feddkd.tensors import Groups

log = logging.getLogger(__name__)
TRIAL_SECONDS = 0.03  # the aim for one trial: many steps if they are short
LONGEST_REPEATED = 1.0  # seconds; a longer trial is not repeated
REPEATS = 4
TOO_SLOW = 3.0  # no more trials for a strategy that takes this many times as long as the best
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
    """Runs folds by a named strategy, or by the one that is fastest for a kind of work."""

    def __init__(self, strategy: str, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        names: tuple[str, ...] = ("loop", "vmap", *(GRAPHS if on_gpu else ("traced",)))
        if strategy not in ("auto", *names):
            problem = f"unknown strategy {strategy!r} on {device.type}"
            raise unknown(problem, strategy, ("auto", *names))
        self.strategy, self.names, self.device = strategy, names, device
        self.chosen: dict[str, str] = {}  # kind of work -> strategy
        self.failed: dict[str, str] = {}  # kind of work -> why the loop replaced the strategy
        self.succeeded: set[str] = set()  # kinds of work that have been computed
        self.recordings = Recordings()
        self.traced = TracedSteps()

    @property
    def compiles(self) -> bool:
        """True if a compiled strategy was the fastest for some kind of work."""
        return any(name in GRAPHS and GRAPHS[name].compiled for name in self.chosen.values())

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
        # a trial ends before the first lane finishes
        most = work.table.active.count(work.table.active[0])

        def trial(name: str, steps: int) -> Groups:
            return self._runner(name)(work, carry, steps)

        def run_all(name: str) -> Groups:
            name = "vmap" if name == "traced" and not trains else name
            return self._runner(name)(work, carry, None)

        level = logging.INFO if trains else logging.DEBUG
        return self.run_or_loop(kind, self.choose(kind, names, trial, most, level=level), run_all)

    def run_or_loop(self, kind: str, name: str, run: Callable[[str], T]) -> T:
        """Return the result by a strategy, or by the loop if its first use fails."""
        try:
            result = run(name)
        except InputError:
            raise
        except Exception as error:
            if name == "loop" or kind in self.succeeded or ran_out(error):
                raise
            self.chosen[kind], self.failed[kind] = "loop", f"{name}: {_first_line(error)}"
            log.warning(
                "%s: %s does not work for this network (%s); its clients are computed one after"
                " another, by 'loop', which takes about as long as engine 'serial'",
                kind,
                name,
                _first_line(error),
            )
            result = run("loop")
        self.succeeded.add(kind)
        return result

    def close(self) -> None:
        self.recordings.clear()
        self.traced.clear()

    def _runner(self, name: str) -> Callable[[Work, Groups, int | None], Groups]:
        if name in GRAPHS:
            return lambda work, carry, steps: self.recordings.run(work, carry, steps, GRAPHS[name])
        if name == "traced":
            return lambda work, carry, steps: run_vmap(work, carry, steps, self._traced_program)
        return {"vmap": run_vmap, "loop": run_loop}[name]

    def _traced_program(self, work: Work) -> RunLanes:
        """Return a traced program; another client half or other shapes have another trace."""
        return partial(self.traced.run, (work.client, work.shared, work.shapes), work.lane_step)

    def choose(
        self,
        kind: str,
        names: Sequence[str],
        trial: Trial,
        most: int = 1,
        steps_per_trial: int = 1,
        level: int = logging.INFO,
    ) -> str:
        """Return the strategy for this kind of work: the one asked for, or the fastest of `names`.

        A trial has at most `most` steps. In the log, one of them counts for `steps_per_trial`.
        """
        if kind not in self.chosen:
            if self.strategy == "auto":
                seconds = self._try_all(kind, names, trial, most)
                self.chosen[kind] = min(seconds, key=lambda name: seconds[name])
                times = ", ".join(
                    f"{name} {1e3 * each / steps_per_trial:.3g}" for name, each in seconds.items()
                )
                log.log(level, "%s: %s (ms a step: %s)", kind, self.chosen[kind], times)
            else:
                self.chosen[kind] = self.strategy
                log.log(level, "%s: %s, as asked", kind, self.strategy)
        return self.chosen[kind]

    def _try_all(
        self, kind: str, names: Sequence[str], trial: Trial, most: int
    ) -> dict[str, float]:
        """Return the least seconds for a step by each strategy that works."""
        seconds: dict[str, float] = {}
        for name in names:
            try:
                best = min(seconds.values(), default=0.0)
                seconds[name] = self._first_time(name, partial(trial, name), best)
            except InputError:
                raise
            except Exception as error:
                if name == "loop":  # the client fails, not the strategy
                    raise
                log.warning(
                    "%s: %s does not work for this network (%s)", kind, name, _first_line(error)
                )
        # in turns, so that other load on the machine slows all of them alike
        for _ in range(REPEATS):
            best = min(seconds.values())
            for name in [name for name in seconds if seconds[name] < TOO_SLOW * best]:
                steps = max(1, min(most, round(TRIAL_SECONDS / seconds[name])))
                if steps * seconds[name] < LONGEST_REPEATED:
                    time_now = self._time(partial(trial, name), steps)
                    seconds[name] = min(seconds[name], time_now)
        return seconds

    def _first_time(self, name: str, trial: Callable[[int], object], best: float) -> float:
        """Return the seconds of a step after a first one.

        The first one itself is enough if it was far too slow. But if it was recorded or traced, it
        may have taken seconds for that.
        """
        first = self._time(trial, 1)
        prepares = name in GRAPHS or name == "traced"
        if best and not prepares and first > TOO_SLOW * max(best, LONGEST_REPEATED):
            return first
        return self._time(trial, 1)

    def _time(self, trial: Callable[[int], object], steps: int) -> float:
        """Return the seconds of a step."""
        wait_for(self.device)
        began = time.perf_counter()
        trial(steps)
        wait_for(self.device)
        return (time.perf_counter() - began) / steps


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
