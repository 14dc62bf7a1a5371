"""Which way of carrying out a step over many lanes is quickest here.

vmap     one vectorised program, launched step by step
traced   the same, traced once: what is launched is tensor operations alone
loop     lane after lane, for networks that vmap cannot take and for convolutions on a CPU
graph    the vectorised step recorded once as a CUDA graph and replayed
streams  every lane on a CUDA stream of its own, all of them recorded as one CUDA graph
fused, fused-streams
         the same two, traced (convolutions over lanes as patches x bmm) and compiled before they are recorded

All give the same numbers up to rounding. `auto` times a few steps of the job at hand and keeps the quickest.
"""

import logging
import time
from collections.abc import Callable

import torch

from feddkd.engines.recordings import Recordings, Way
from feddkd.engines.tracing import traced
from feddkd.engines.work import Step, Work, lanes_in, run_loop, run_vmap
from feddkd.errors import InputError, choices
from feddkd.method import Batch
from feddkd.params import Groups

log = logging.getLogger(__name__)
TRIAL_STEPS = 3
WAYS = {
    "graph": Way(),
    "streams": Way(streams=True),
    "fused": Way(compiled=True),
    "fused-streams": Way(streams=True, compiled=True),
}


class Chooser:
    """Runs folds by a named strategy, or by the one that was quickest on a few steps of the same kind of work."""

    def __init__(self, strategy: str, device: torch.device) -> None:
        known = ("vmap", "loop", *WAYS) if device.type == "cuda" else ("vmap", "traced", "loop")
        if strategy not in ("auto", *known):
            raise InputError(f"unknown strategy {strategy!r} on {device.type}; there are: auto, {choices(known)}")
        self.strategy, self.known = strategy, known
        self.chosen: dict[str, str] = {}  # what kind of work -> strategy
        self.recordings = Recordings()
        self.traces: dict[tuple[object, ...], Step] = {}

    @property
    def records(self) -> bool:
        """Whether CUDA graphs are used at all."""
        return self.strategy not in ("vmap", "traced", "loop")

    @property
    def fuses(self) -> bool:
        """Whether compiling was found to pay."""
        return any(name in WAYS and WAYS[name].compiled for name in self.chosen.values())

    def run(self, work: Work, carry: Groups) -> Groups:
        return self._runner(self._choose(work, carry))(work, carry, None)

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
        """Traced anew for inputs of other shapes."""

        def call(sent: Groups, carry: Groups, batch: Batch) -> Groups:
            key = (work.phase.name, work.shared, batch.x.shape, work.shapes)
            if key not in self.traces:
                self.traces[key] = traced(work.many, sent, carry, batch)
            return self.traces[key](sent, carry, batch)

        return call

    def _choose(self, work: Work, carry: Groups) -> str:
        kind = f"{work.phase.name}, {lanes_in(carry)} lanes of {work.tape.indices.shape[2]}"
        if kind not in self.chosen:
            self.chosen[kind] = self.strategy if self.strategy != "auto" else self._quickest(kind, work, carry)
        return self.chosen[kind]

    def _quickest(self, kind: str, work: Work, carry: Groups) -> str:
        seconds: dict[str, float] = {}
        worth_compiling = work.phase.reads.random  # training; a test set is read through too seldom
        for name in self.known:
            if name in WAYS and WAYS[name].compiled and not worth_compiling:
                continue
            try:
                seconds[name] = self._time(name, work, carry)
            except InputError:
                raise
            except Exception as error:
                if name == "loop":  # not the strategy's fault: the client itself fails
                    raise
                log.warning("%s: %s does not work for this network (%s)", kind, name, str(error).splitlines()[0])
        best = min(seconds, key=lambda name: seconds[name])
        log.info("%s: %s (ms a step: %s)", kind, best, ", ".join(f"{n} {1e3 * s:.3g}" for n, s in seconds.items()))
        return best

    def _time(self, name: str, work: Work, carry: Groups) -> float:
        """Seconds a step of all lanes, after one step to warm up."""
        run = self._runner(name)
        steps = min(TRIAL_STEPS, len(work.tape.active))
        run(work, carry, 1)
        _wait(work)
        began = time.perf_counter()
        run(work, carry, steps)
        _wait(work)
        return (time.perf_counter() - began) / steps


def _wait(work: Work) -> None:
    if work.tape.indices.is_cuda:
        torch.cuda.synchronize(work.tape.indices.device)
