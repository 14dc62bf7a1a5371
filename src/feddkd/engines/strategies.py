"""Which way of carrying out a step over many lanes is quickest here.

vmap     one vectorised program, launched step by step
traced   the same, traced once: what is launched is tensor operations alone
loop     lane after lane, for networks that vmap cannot take and for convolutions on a CPU
graph    the vectorised step recorded once as a CUDA graph and replayed
streams  every lane on a CUDA stream of its own, all of them recorded as one CUDA graph
fused, fused-streams
         the same two, traced (convolutions over lanes as patches x bmm) and compiled before they are recorded

All give the same numbers up to rounding. `auto` times some steps of the job at hand and keeps the quickest.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from feddkd.engines.recordings import Recordings, Way
from feddkd.engines.tracing import traced
from feddkd.engines.work import Step, Work, lanes_in, run_loop, run_vmap
from feddkd.errors import InputError, choices
from feddkd.method import Batch
from feddkd.params import Groups

log = logging.getLogger(__name__)
ENOUGH = 0.03  # seconds that a timed trial should take: many steps where they are short
PATIENCE = 1.0  # a trial longer than this is not repeated
REPEATS = 3
HOPELESS = 3.0  # times the best so far: no further trial
WAYS = {
    "graph": Way(),
    "streams": Way(streams=True),
    "fused": Way(compiled=True),
    "fused-streams": Way(streams=True, compiled=True),
}


Trial = Callable[[str, int], object]  # carries out so many steps by the strategy of that name


class Chooser:
    """Runs folds by a named strategy, or by the one that was quickest on a few steps of the same kind of work."""

    def __init__(self, strategy: str, device: torch.device) -> None:
        known = ("loop", "vmap", *WAYS) if device.type == "cuda" else ("loop", "vmap", "traced")
        if strategy not in ("auto", *known):
            raise InputError(f"unknown strategy {strategy!r} on {device.type}; there are: auto, {choices(known)}")
        self.strategy, self.known, self.device = strategy, known, device
        self.chosen: dict[str, str] = {}  # what kind of work -> strategy
        self.recordings = Recordings()
        self.traces: dict[tuple[object, ...], Step] = {}

    @property
    def fuses(self) -> bool:
        """Whether compiling was found to pay."""
        return any(name in WAYS and WAYS[name].compiled for name in self.chosen.values())

    def run(self, work: Work, carry: Groups) -> Groups:
        worth_compiling = work.phase.reads.random  # training; a test set is read through too seldom
        names = [name for name in self.known if worth_compiling or name not in WAYS or not WAYS[name].compiled]
        kind = f"{work.phase.name}, {lanes_in(carry)} lanes of {work.tape.indices.shape[2]}"
        most = work.tape.active.count(work.tape.active[0])  # a trial ends with the first lane that does
        name = self.pick(kind, names, lambda name, steps: self._runner(name)(work, carry, steps), most)
        return self._runner(name)(work, carry, None)

    def close(self) -> None:
        self.recordings.clear()
        self.traces.clear()

    def _runner(self, name: str) -> Callable[[Work, Groups, int | None], Groups]:
        if name in WAYS:
            return lambda work, carry, steps: self.recordings.run(work, carry, steps, WAYS[name])
        if name == "traced":
            return lambda work, carry, steps: run_vmap(work, carry, steps, self._traced)
        return {"vmap": run_vmap, "loop": run_loop}[name]

    def _traced(self, work: Work) -> Step:
        """Traced anew for another client or inputs of other shapes."""

        def call(sent: Groups, carry: Groups, batch: Batch) -> Groups:
            key = (work.client, work.shared, batch.x.shape)
            if key not in self.traces:
                self.traces[key] = traced(work.many, sent, carry, batch)
            return self.traces[key](sent, carry, batch)

        return call

    def pick(self, kind: str, names: Sequence[str], trial: Trial, most: int = 1, per: int = 1) -> str:
        """The strategy for this kind of work: the one asked for, or the quickest of those named in trials of at most so many
        steps. `per`: what one step of the trial counts for in the log."""
        if kind not in self.chosen:
            self.chosen[kind] = self.strategy if self.strategy != "auto" else self._quickest(kind, names, trial, most, per)
        return self.chosen[kind]

    def _quickest(self, kind: str, names: Sequence[str], trial: Trial, most: int, per: int) -> str:
        seconds: dict[str, float] = {}
        for name in names:
            try:
                seconds[name] = self._time(partial(trial, name), most, min(seconds.values(), default=math.inf))
            except InputError:
                raise
            except Exception as error:
                if name == "loop":  # not the strategy's fault: the client itself fails
                    raise
                log.warning("%s: %s does not work for this network (%s)", kind, name, str(error).splitlines()[0])
        best = min(seconds, key=lambda name: seconds[name])
        log.info("%s: %s (ms a step: %s)", kind, best, ", ".join(f"{n} {1e3 * s / per:.3g}" for n, s in seconds.items()))
        return best

    def _time(self, trial: Callable[[int], object], most: int, best: float) -> float:
        """Seconds a step, the least of some trials, after one to warm up. One that is far behind is not asked again."""
        trial(1)
        once = self._clock(trial, 1)
        steps = max(1, min(most, round(ENOUGH / once)))
        if once > HOPELESS * best or once * steps > PATIENCE:
            return once
        again = [self._clock(trial, steps) for _ in range(REPEATS)]
        return min(again if steps > 1 else [once, *again])

    def _clock(self, trial: Callable[[int], object], steps: int) -> float:
        wait_for(self.device)
        began = time.perf_counter()
        trial(steps)
        wait_for(self.device)
        return (time.perf_counter() - began) / steps


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
