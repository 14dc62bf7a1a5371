"""The loop over rounds: cohort -> exchanges -> evaluation -> row. It reads like Algorithm 1.

Several runs (seeds of one experiment) go through it in lock-step. The numbers of a run do not
depend on the other runs.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from feddkd.engines.interface import Engine
from feddkd.errors import InputError
from feddkd.method import Exchange, Method
from feddkd.models.functional import Model
from feddkd.rounds.availability import Tolerance
from feddkd.rounds.diagnostics import diagnose
from feddkd.rounds.evaluation import USUAL, Evaluation, Measured, measure
from feddkd.rounds.example_groups import ByGroup, no_groups
from feddkd.rounds.exchange import Exchanges, prepare_order
from feddkd.rounds.selection import UNIFORM, Selection
from feddkd.rounds.selection.cohorts import begin_round
from feddkd.rounds.selection.rule import Known
from feddkd.rounds.turns import Row as Row
from feddkd.rounds.turns import Run as Run
from feddkd.rounds.turns import Turn
from feddkd.spec.types import Count, Share, checked
from feddkd.tensors import Groups, is_finite

log = logging.getLogger(__name__)
PATIENT = Tolerance()


def play(
    method: Method,
    model: Model,
    engine: Engine,
    runs: Sequence[Run],
    *,
    cohort: int,
    last: int,
    evaluation: Evaluation = USUAL,
    diagnostics: bool = False,
    first: int = 1,
    tolerance: Tolerance = PATIENT,
    selection: Selection = UNIFORM,
    by_group: ByGroup = no_groups,
) -> Iterator[list[Row]]:
    """Play the rounds `first` to `last` and yield for each round one row for each run. The states
    and costs of the runs are updated on the way.

    A run that cannot continue keeps its `error` and has no more rows. If no other run is left, the
    error is raised.
    """
    loop = Loop(
        method.fitted(model),
        Exchanges(model, engine, tolerance),
        partial(begin_round, engine, selection, cohort=cohort),
        evaluation,
        diagnostics,
        last,
        by_group,
    )
    play_round = loop.round if tolerance.on_divergence == "continue" else loop.checked_round
    for t in range(first, last + 1):
        turns = play_round(runs, t)
        _report_errors(runs)
        runs = [turn.run for turn in turns]
        yield [{**turn.row, **asdict(turn.run.costs)} for turn in turns]


def _report_errors(runs: Sequence[Run]) -> None:
    """Log the errors of runs; raise the first one if all runs have one."""
    errors = [run.error for run in runs if run.error]
    if len(errors) == len(runs):
        raise errors[0]
    for error in errors:
        log.warning("%s; the other runs continue", error)


@dataclass(frozen=True)
class Loop:
    """The parts that are the same in all rounds."""

    method: Method
    exchanges: Exchanges
    begin: Callable[..., list[Turn]]  # (runs, round) -> their turns, with the selected clients
    evaluation: Evaluation
    diagnostics: bool
    last: int  # the last round
    by_group: ByGroup

    @property
    def engine(self) -> Engine:
        """The engine of the exchanges."""
        return self.exchanges.engine

    def checked_round(self, runs: Sequence[Run], t: int) -> list[Turn]:
        """Play a round, and play it again carefully for each run whose numbers are not finite.

        Numbers are checked once, at the end of the round, for all runs together. A run that fails
        the check returns to the state before the round; in the repetition every upload is checked.
        """
        before = {
            run.index: (run.state, run.costs, self.engine.memos_of(run.index)) for run in runs
        }
        facts_before = self.engine.facts()
        turns = self.round(runs, t)
        careful = replace(self, exchanges=replace(self.exchanges, careful=True))
        checked_turns: list[Turn] = []
        for turn, good in zip(turns, _good(turns), strict=True):
            if not good:
                turn.run.state, turn.run.costs, memos = before[turn.run.index]
                self.engine.restore(turn.run.index, memos)
                self.engine.adopt(facts_before)
            checked_turns += [turn] if good else careful.round([turn.run], t)
        return checked_turns

    def round(self, runs: Sequence[Run], t: int) -> list[Turn]:
        """Play one round of all runs; return the turns of those that got through it."""
        for run in runs:
            run.state = {**run.state, "start": run.state["params"]}
        turns = self.begin(runs, t=t)
        averages: dict[int, Groups] = {}  # run -> its state before the first phase that refines it
        wanted = frozenset({"model"} if self.diagnostics else ())
        for exchange in self.method.plan(t, wanted=wanted):
            turns = [turn for turn in turns if turn.run.error is None]
            if exchange.phase.refines and not averages:
                averages = {turn.run.index: turn.run.state for turn in turns}
                self._prepare_clients(turns, 1)
                self._judge(turns, prefix="average_")
            self.exchanges.perform(exchange, turns)
        turns = [turn for turn in turns if turn.run.error is None]
        self._prepare_clients(turns, 2)
        self._judge(turns)
        if self.diagnostics:
            self._diagnose([turn for turn in turns if not turn.over], averages)
        return turns

    def _prepare_clients(self, turns: Sequence[Turn], step: int) -> None:
        """Let clients do the method's phase before their models are judged, if it has one.

        `step` counts the evaluations of a round; random draws follow it.
        """
        phase = self.method.judging
        if phase is None or self.evaluation.is_global or not self._is_judged(turns):
            return
        exchange = Exchange(phase, step=step, steps=2, retain=self.method.held)
        orders = []
        for turn in turns:
            clients = self.evaluation.chosen(len(self.engine.sizes(turn.run.index)))
            orders.append(prepare_order(exchange, turn, clients))
        self.engine.exchange(exchange, orders)

    def _is_judged(self, turns: Sequence[Turn]) -> bool:
        """Return True if there are runs left and their round is evaluated."""
        return bool(turns) and self.evaluation.is_due(turns[0].round, self.last)

    def _judge(self, turns: Sequence[Turn], prefix: str = "") -> None:
        """Evaluate the models and enter the metrics in the rows."""
        states = [(turn.run.index, turn.run.state) for turn in turns]
        if not self._is_judged(turns):
            return
        _enter(turns, f"{prefix}test", measure(self.engine, states, self.evaluation, "test"))
        for turn in [] if prefix else turns:
            turn.row |= self.by_group(self.engine, turn.run)
        if all(turn.run.has_validation for turn in turns):
            measured = measure(self.engine, states, self.evaluation, "validation")
            _enter(turns, f"{prefix}validation", measured)

    def _diagnose(self, turns: Sequence[Turn], averages: dict[int, Groups]) -> None:
        """Enter the theory's quantities in the rows of rounds that were played to their end; after
        other rounds clients may hold no model.
        """
        if not turns:
            return
        states = []
        for turn in turns:
            end = turn.run.state
            states.append((turn.run.index, end, averages.get(turn.run.index, end)))
        retain = self.method.plan(turns[0].round)[-1].retain
        quantities = diagnose(self.engine, states, [turn.cohort for turn in turns], retain)
        for turn, found in zip(turns, quantities, strict=True):
            turn.row["diagnostics"] = found


def cohort_size(cohort: int | float, clients: int, least: int = 1) -> int:
    """Return m = max(int(C K), 1) for a fraction C, or the number itself; raise an InputError if
    fewer than `least`.
    """
    cohort = checked(cohort, Count | Share, "cohort")
    size = cohort if isinstance(cohort, int) else max(int(cohort * clients + 1e-9), 1)
    if size > clients:
        raise InputError(f"cohort asks for {size} clients, but there are {clients}")
    if size < least:
        raise InputError(f"min_clients is {least}, but a cohort has {size} clients")
    return size


def choose(seed: int, t: int, clients: int, cohort: int) -> tuple[int, ...]:
    """Return the active clients of round t, drawn uniformly without replacement, in order."""
    known = Known(seed, t, range(clients), cohort, {})
    return tuple(sorted(int(client) for client in UNIFORM.draw(known)))


def _good(turns: Sequence[Turn]) -> list[bool]:
    """Return True for each run whose numbers are finite, by one transfer from the device."""
    if not turns:
        return []
    finite = torch.stack([is_finite(turn.run.state) for turn in turns]).tolist()
    return [
        state_is_finite and turn.loss_is_finite and not turn.failed
        for turn, state_is_finite in zip(turns, finite, strict=True)
    ]


def _enter(turns: Sequence[Turn], name: str, measured: Sequence[Measured]) -> None:
    """Enter metrics in the rows, under keys that begin with the name of the set."""
    for turn, result in zip(turns, measured, strict=True):
        turn.row |= {f"{name}_{metric}": value for metric, value in result.values.items()}
        turn.row |= {f"{name}_client_{metric}": each for metric, each in result.by_client.items()}
        turn.loss_is_finite &= result.is_finite
