"""The loop: cohort -> exchanges -> evaluate -> row. It reads like Algorithm 1.

Several runs (seeds of one experiment) go through it in lock-step; a run's numbers do not depend on
who runs beside it.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from feddkd.engines.interface import Engine
from feddkd.errors import InputError
from feddkd.method import Method
from feddkd.models.functional import Model
from feddkd.randomness import generator
from feddkd.rounds.availability import Tolerance
from feddkd.rounds.diagnostics import diagnose
from feddkd.rounds.evaluation import Measured, Protocol, measure
from feddkd.rounds.exchange import Exchanges, Turn
from feddkd.rounds.exchange import Row as Row
from feddkd.rounds.exchange import Run as Run
from feddkd.rounds.metrics import DEFAULT, Metric
from feddkd.spec.types import Count, Share, checked
from feddkd.tensors import Groups, is_finite

log = logging.getLogger(__name__)
PATIENT = Tolerance()
Measure = Callable[..., list[Measured]]  # (states, source="test" or "validation")


def play(
    method: Method,
    model: Model,
    engine: Engine,
    runs: Sequence[Run],
    *,
    cohort: int,
    last: int,
    protocol: Protocol,
    metrics: Sequence[Metric] = DEFAULT,
    outputs: int = 1,
    diagnostics: bool = False,
    first: int = 1,
    tolerance: Tolerance = PATIENT,
) -> Iterator[list[Row]]:
    """Yield one row a run, round after round; the runs' states and costs go along.

    A run that cannot go on keeps its `error` and has no more rows; the error is raised once there
    is no other run left.
    """
    loop = Loop(
        method.fitted(model),
        Exchanges(model, engine, tolerance),
        cohort,
        partial(measure, engine, protocol=protocol, metrics=metrics, outputs=outputs),
        diagnostics,
    )
    for t in range(first, last + 1):
        turns = (
            loop.checked_round(runs, t)
            if tolerance.on_divergence != "continue"
            else loop.round(runs, t)
        )
        _tell_of_ended(runs)
        runs = [turn.run for turn in turns]
        yield [{**turn.row, **asdict(turn.run.costs)} for turn in turns]


def _tell_of_ended(runs: Sequence[Run]) -> None:
    errors = [run.error for run in runs if run.error]
    if len(errors) == len(runs):
        raise errors[0]
    for error in errors:
        log.warning("%s; the other runs go on", error)


@dataclass(frozen=True)
class Loop:
    """All that stays the same through the rounds."""

    method: Method
    exchanges: Exchanges
    cohort: int
    measure: Measure
    diagnostics: bool

    @property
    def engine(self) -> Engine:
        return self.exchanges.engine

    def checked_round(self, runs: Sequence[Run], t: int) -> list[Turn]:
        """A round in which no numbers go bad. Whether they did is seen at its end, by one look for
        all runs together; a run where they did plays the round again from its beginning, and every
        upload is looked at.
        """
        before = {
            run.index: (run.state, run.costs, self.engine.memos_of(run.index)) for run in runs
        }
        decided = self.engine.facts()
        turns = self.round(runs, t)
        careful = replace(self, exchanges=replace(self.exchanges, careful=True))
        found: list[Turn] = []
        for turn, good in zip(turns, _good(turns), strict=True):
            if not good:
                turn.run.state, turn.run.costs, memos = before[turn.run.index]
                self.engine.restore(turn.run.index, memos)
                self.engine.adopt(decided)
            found += [turn] if good else careful.round([turn.run], t)
        return found

    def round(self, runs: Sequence[Run], t: int) -> list[Turn]:
        """One round of all runs; returns those that got through it."""
        turns = [self._begin(run, t) for run in runs]
        averages: dict[int, Groups] = {}  # the states before anything refined them
        for exchange in self.method.plan(
            t, wanted=frozenset({"model"} if self.diagnostics else ())
        ):
            turns = [turn for turn in turns if turn.run.error is None]
            if exchange.phase.refines and not averages:
                averages = {turn.run.index: turn.run.state for turn in turns}
                self._judge(turns, prefix="average_")
            self.exchanges.perform(exchange, turns)
        turns = [turn for turn in turns if turn.run.error is None]
        self._judge(turns)
        if self.diagnostics:
            self._diagnose([turn for turn in turns if not turn.over], averages)
        return turns

    def _begin(self, run: Run, t: int) -> Turn:
        clients = choose(run.seed, t, len(self.engine.sizes(run.index)), self.cohort)
        run.state = {**run.state, "start": run.state["params"]}
        return Turn(run, t, clients, {"round": t, "clients": list(clients)})

    def _judge(self, turns: Sequence[Turn], prefix: str = "") -> None:
        states = [(turn.run.index, turn.run.state) for turn in turns]
        if not states:
            return
        _enter(turns, f"{prefix}test", self.measure(states, source="test"))
        if all(turn.run.has_validation for turn in turns):
            _enter(turns, f"{prefix}validation", self.measure(states, source="validation"))

    def _diagnose(self, turns: Sequence[Turn], averages: dict[int, Groups]) -> None:
        """Of whole rounds alone: where one was cut short, clients may hold no model of it."""
        if not turns:
            return
        ends = [
            (turn.run.index, turn.run.state, averages.get(turn.run.index, turn.run.state))
            for turn in turns
        ]
        retain = self.method.plan(turns[0].round)[-1].retain
        for turn, found in zip(
            turns, diagnose(self.engine, ends, [turn.cohort for turn in turns], retain), strict=True
        ):
            turn.row["diagnostics"] = found


def cohort_size(cohort: int | float, clients: int, least: int = 1) -> int:
    """Return m = max(int(C K), 1) for a fraction C, or the number itself; raise an InputError if
    fewer than `least`.
    """
    cohort = checked(cohort, Count | Share, "cohort")
    size = cohort if isinstance(cohort, int) else max(int(cohort * clients + 1e-9), 1)
    if size > clients:
        raise InputError(f"cohort asks for {size} clients, and there are {clients}")
    if size < least:
        raise InputError(f"min_clients is {least}, and a cohort has {size} clients")
    return size


def choose(seed: int, t: int, clients: int, cohort: int) -> tuple[int, ...]:
    """The active clients of round t, uniformly without replacement, in order of their numbers."""
    drawn = generator(("cohort", seed, t)).choice(clients, size=cohort, replace=False)
    return tuple(sorted(int(client) for client in drawn))


def _good(turns: Sequence[Turn]) -> list[bool]:
    """Which runs got through a round with finite numbers. One transfer from the device."""
    if not turns:
        return []
    finite = torch.stack([is_finite(turn.run.state) for turn in turns]).tolist()
    return [
        state_is_finite and turn.loss_is_finite and not turn.failed
        for turn, state_is_finite in zip(turns, finite, strict=True)
    ]


def _enter(turns: Sequence[Turn], name: str, measured: Sequence[Measured]) -> None:
    for turn, result in zip(turns, measured, strict=True):
        turn.row |= {f"{name}_{metric}": value for metric, value in result.values.items()}
        turn.row |= {f"{name}_client_{metric}": each for metric, each in result.by_client.items()}
        turn.loss_is_finite &= result.is_finite
