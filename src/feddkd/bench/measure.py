"""Measures jobs: our engine and the plain loop in turn, and the figure that judges each job."""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from feddkd.bench.baseline import PlainLoop, recorded
from feddkd.bench.clock import (
    Entrant,
    Timing,
    flops_an_example,
    growth,
    matmul_peak,
    race,
    timed,
)
from feddkd.bench.engine_side import Drive, driven
from feddkd.bench.jobs import BenchJob
from feddkd.bench.setting import BenchSetting
from feddkd.data.federation import Federation
from feddkd.errors import unknown
from feddkd.rounds.loop import choose

log = logging.getLogger(__name__)
Entry = dict[str, Any]
# the figures that need no other measurement
PLAIN = ("ms a step of all clients", "s a round", "plain loop / ours")


class JobTimings(NamedTuple):
    """The times of a round: on our engine, in the plain loop, with single strategies of the engine;
    and the engine's facts.
    """

    ours: Timing
    plain: Timing
    singles: Mapping[str, Timing]
    facts: Mapping[str, Any]


@dataclass
class Bench:
    """Measures jobs in one setting; times that several jobs need are measured once."""

    setting: BenchSetting
    jobs: Mapping[str, BenchJob]
    strategies: bool = False  # True: measure every single strategy of the engine, too
    _known: dict[str, Timing] = field(default_factory=dict)

    def find(self, name: str) -> BenchJob:
        """Return a job by its name, or raise InputError."""
        if name not in self.jobs:
            raise unknown(f"unknown job {name!r}", name, self.jobs)
        return self.jobs[name]

    def measure(self, job: BenchJob) -> Entry:
        """Return all measurements of one job."""
        with self.setting.arithmetic():
            federations = job.federations(self.setting.device)
            loop = PlainLoop.of(job, self.setting, federations)
            with ExitStack() as open_, driven(job, self.setting, federations) as drive:
                singles = self._singles(job, federations, drive, open_)
                entrants = _ours(job, drive), _plain(job, loop), *singles.values()
                ours, plain, *rest = race(self.setting.device, self.setting.repeats, *entrants)
                facts: Mapping[str, Any] = getattr(drive.engine, "facts", dict)()
                measured = JobTimings(ours, plain, dict(zip(singles, rest, strict=True)), facts)
            self._known[job.name] = ours
            extra = self._one_pass(job, loop) if job.distil else self._compared(job, federations)
            extra |= self._regret(job, federations, measured)
            return self._entry(job, measured, extra)

    def _singles(
        self, job: BenchJob, federations: list[Federation], drive: Drive, open_: ExitStack
    ) -> dict[str, Entrant]:
        """Return an entrant for each single strategy that works for the job."""
        working = {}
        for name in getattr(drive.engine, "strategies", ()) if self.strategies else ():
            setting = replace(self.setting, strategy=name)
            entrant = _ours(job, open_.enter_context(driven(job, setting, federations)))
            try:
                entrant.before(1)
                entrant.action(1)
                working[name] = entrant
            except Exception as error:  # for example, vmap cannot run every network
                log.warning("%s: %s does not work (%s)", job.name, name, error)
        return working

    def _regret(self, job: BenchJob, federations: list[Federation], measured: JobTimings) -> Entry:
        """Return the time of a new run by its rounds, divided by that of the best fixed strategy.

        The time of a fixed strategy is that of its later rounds: its preparation is not counted.
        """
        if not measured.singles or job.distil:
            return {}
        best = min(timing.median for timing in measured.singles.values())
        with driven(job, self.setting, federations) as drive:
            ends = growth(_ours(job, drive), self.setting.device)
        return {"regret": {str(t): seconds / (t * best) for t, seconds in ends.items()}}

    @cached_property
    def peak(self) -> float:
        """Operations per second of a large matrix product."""
        return matmul_peak(self.setting)

    def _alone(self, job: BenchJob, federations: list[Federation]) -> Timing:
        with driven(job, self.setting, federations) as drive:
            (timing,) = race(self.setting.device, self.setting.repeats, _ours(job, drive))
        return timing

    def _one_pass(self, job: BenchJob, loop: PlainLoop) -> Entry:
        """Return the least time of a DKD step: one pass through the network.

        On a GPU it is measured as a CUDA graph, because launching kernels takes longer than the
        work.
        """
        device, repeats = self.setting.device, self.setting.repeats
        action = loop.passes(job.distil, job.images_read // job.distil, job.classes)
        eager = timed(action, device, repeats).median / job.distil
        if device.type != "cuda":
            return {"pass_seconds": eager}
        with torch.cuda.device(device):
            graph = timed(recorded(action), device, repeats).median / job.distil
        return {"pass_seconds": graph, "pass_eager_seconds": eager}

    def _compared(self, job: BenchJob, federations: list[Federation]) -> Entry:
        """Return the other times that a job is compared with."""
        if job.seeds > 1:
            return {"one_seed_seconds": self._alone(job, federations[:1]).median / job.units}
        if job.alpha is not None:
            return {
                "client_steps": job.client_steps,
                "equal_client_step_seconds": self._client_step(self.jobs["vgg9"]),
            }
        return {}

    def _client_step(self, job: BenchJob) -> float:
        if job.name not in self._known:
            self._known[job.name] = self._alone(job, job.federations(self.setting.device))
        return self._known[job.name].median / job.client_steps

    def _entry(self, job: BenchJob, measured: JobTimings, extra: Entry) -> Entry:
        mine, plain = measured.ours.per(job.units), measured.plain.per(job.units)
        forward, both = flops_an_example(job.network().net, job.example())
        rate = job.images_read / measured.ours.median
        flops = rate * (both + forward if job.distil else both)
        return {
            **{f"engine_{name}": fact for name, fact in measured.facts.items()},
            "job": job.name,
            "engine": self.setting.engine,
            "strategy": _strategy(measured.facts),
            "device": self.setting.device_name,
            "precision": self.setting.precision,
            "unit": job.unit,
            "seconds": mine.median,
            "seconds_range": [mine.low, mine.high],
            "loop_seconds": plain.median,
            "loop_seconds_range": [plain.low, plain.high],
            "ratio": plain.median / mine.median,
            **_by_strategy(measured, job.units),
            **extra,
            **_figure(job, mine, plain, extra),
            "images_per_second": rate,
            "tflops": flops / 1e12,
            "peak_tflops": self.peak / 1e12,
            "peak_share": flops / self.peak,
            "first_seconds": mine.first,
            "repeats": mine.repeats,
            "method": job.method,
            "model": job.model,
            "clients": job.clients,
            "cohort": job.cohort,
            "seeds": job.seeds,
            "steps": job.units,
            "what": job.what,
        }


def _ours(job: BenchJob, drive: Drive) -> Entrant:
    if job.distil:
        return Entrant(lambda t: drive.play(t, phase=1), before=drive.play)
    return Entrant(drive.play)


def _plain(job: BenchJob, loop: PlainLoop) -> Entrant:
    if job.distil:
        teachers = loop.teachers()
        return Entrant(lambda t: loop.distil(teachers, job.distil))

    def play(t: int) -> None:
        loop.round([choose(seed, t, job.clients, job.cohort) for seed in range(job.seeds)])

    return Entrant(play)


def _figure(job: BenchJob, mine: Timing, plain: Timing, extra: Entry) -> Entry:
    """Return the number that the table of targets lists, and its unit."""
    if job.distil:
        return {"figure": mine.median / extra["pass_seconds"], "figure_of": "x one pass"}
    if job.seeds > 1:
        return {"figure": mine.median / extra["one_seed_seconds"], "figure_of": "x one seed"}
    if job.alpha is not None:
        ideal = extra["client_steps"] * extra["equal_client_step_seconds"]
        return {"figure": mine.median / ideal, "figure_of": "x equal job"}
    time = (1000 * mine.median, PLAIN[0]) if job.unit == "step" else (mine.median, PLAIN[1])
    figure, of = (plain.median / mine.median, PLAIN[2]) if job.name == "mlp" else time
    return {"figure": figure, "figure_of": of}


def _by_strategy(measured: JobTimings, units: int) -> Entry:
    """Return the seconds of every single strategy, and the cost of choosing among them.

    The cost is our time divided by the best time of the strategies and the plain loop.
    """
    if not measured.singles:
        return {}
    seconds = {name: timing.median / units for name, timing in measured.singles.items()}
    best = min([*seconds.values(), measured.plain.median / units])
    return {"strategy_seconds": seconds, "auto_over_best": measured.ours.median / units / best}


def _strategy(facts: Mapping[str, Any]) -> str | None:
    """Return the engine's strategy; all of them, if it chose one for each shape of work."""
    strategy = facts.get("strategy")
    if isinstance(strategy, Mapping):
        return ", ".join(sorted(set(map(str, strategy.values()))))
    return strategy
