"""`Simulation`: a job on an engine, which yields rows; snapshots to continue from."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self

from feddkd.data.federation import Federation
from feddkd.engines.interface import Engine, EngineFactory
from feddkd.engines.select import find_device, open_engine
from feddkd.engines.serial import Serial
from feddkd.engines.threads import fitting_threads
from feddkd.errors import InputError, RunError
from feddkd.method import Method
from feddkd.methods.aggregation import with_secret_noise
from feddkd.rounds.costs import Costs
from feddkd.rounds.evaluation import confusions, measure
from feddkd.rounds.example_groups import GroupMeasure
from feddkd.rounds.loop import Row, Run, play
from feddkd.rounds.metrics import ACCURACY, SUCCESS_KEY
from feddkd.rounds.privacy import ledger
from feddkd.rounds.remarks import remark_on_batches
from feddkd.simulation.first_state import begin
from feddkd.simulation.job import Job
from feddkd.tensors import Groups


@dataclass(frozen=True)
class Snapshot:
    """The state of a run after a round, enough to continue from it."""

    round: int
    state: Groups
    costs: Costs
    memos: Mapping[int, Groups]  # client -> memo
    # the engine's choices by timing, so that it chooses the same again
    engine: Mapping[str, Any] = field(default_factory=dict)


class Simulation:
    """A job on an engine. It holds the engine's resources until `close()` or the end of its `with`
    block.

    `engine` is an engine's name or a function that makes one, `options` are those of a named
    engine. With `resume`, the runs continue from snapshots, which are all of the same round.
    """

    def __init__(
        self,
        job: Job,
        engine: str | EngineFactory = "serial",
        device: str = "cpu",
        options: Mapping[str, Any] | None = None,
        resume: Sequence[Snapshot] = (),
    ) -> None:
        self.job, self.round = job, resume[0].round if resume else 0
        self.begun = begin(job, find_device(device))
        self.model, self.runs = self.begun.model, self.begun.runs
        self._open = ExitStack()
        self.engine = open_engine(
            engine, self.model, self.begun.federations, self.begun.memos, job.dtype, options or {}
        )
        self.evaluation = replace(job.evaluation, sample=self.begun.sample)
        self._by_group = GroupMeasure(
            self.model,
            self.begun.federations,
            self.begun.memos,
            job.dtype,
            self.evaluation,
        )
        first = self.begun.federations[0], self.runs[0].state
        try:
            threads = fitting_threads(self.model, job.method, *first, job.dtype)
            self._open.enter_context(threads)
            self._check()
            self._by_group.check(self.engine)
            self._restore(resume)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free what the engine holds."""
        self.engine.close()
        self._open.close()

    def _check(self) -> None:
        if self.engine.remote and self.job.attack.aim and not self.evaluation.is_global:
            raise InputError(
                f"attack {self.job.attack} is judged on the shared model on Flower, and this run"
                ' judges each client\'s: set evaluation = "global"'
            )
        sizes = [size for federation in self.begun.federations for size in federation.sizes]
        if not self.engine.remote and not all(sizes):
            raise InputError(
                "there are clients without examples; only on Flower can they bring their own:"
                " feddkd flower server"
            )
        if self.engine.remote and any(p.reads.source == "pooled" for p in self.job.method.phases):
            raise InputError(
                f"{self.job.method} trains on the examples of all clients in one place, and on"
                " Flower they stay on their nodes; run it on another engine"
            )

        whole = [metric.name for metric in self.evaluation.metrics if metric.whole is not None]
        if whole and (self.engine.remote or not self.evaluation.is_global):
            raise InputError(
                f"metric {whole[0]!r} needs all predictions at once: it is for evaluation='global'"
                " on this machine"
            )

    def _restore(self, snapshots: Sequence[Snapshot]) -> None:
        for run, memos in zip(self.runs, self.begun.malicious, strict=True):
            if memos and not self.engine.remote:
                self.engine.restore(run.index, memos)
        for run, snapshot in zip(self.runs, snapshots, strict=False):
            run.state, run.costs = snapshot.state, snapshot.costs
            self.engine.restore(run.index, snapshot.memos)
            self.engine.adopt(snapshot.engine)
        if self.engine.remote:  # its clients are sent the seed
            for run in self.runs:
                run.state = with_secret_noise(run.state)

    def rounds(self) -> Iterator[dict[int, Row]]:
        """Return an iterator over the remaining rounds. It yields the rows of a round by run.

        A run that fails keeps its `error` and has no more rows. The iterator ends early when no run
        is left.
        """
        method = self.job.method.fitted(self.model)
        remark_on_batches(method, self.begun.federations[0].sizes)
        privacy = ledger(
            method, self.job.clients, self.job.cohort_size, self.job.delta, self.round + 1
        )
        return self._rows(privacy)

    def _rows(self, privacy: Iterator[dict[str, float]]) -> Iterator[dict[int, Row]]:
        with suppress(RunError):  # all runs have failed; each keeps its error
            for rows in self.play(self.job.method, self.round + 1, self.job.rounds):
                spent = next(privacy)
                yield {
                    run.index: {**row, **spent} for run, row in zip(self.going, rows, strict=True)
                }

    def play(self, method: Method, first: int, last: int) -> Iterator[list[Row]]:
        """Yield the rows of the rounds `first` to `last` of a method; raise the first error if all
        runs fail.
        """
        job = self.job
        for rows in play(
            method,
            self.model,
            self.engine,
            self.runs,
            cohort=job.cohort_size,
            last=last,
            evaluation=self.evaluation,
            diagnostics=job.diagnostics,
            first=first,
            tolerance=job.tolerance,
            selection=job.selection,
            by_group=self._by_group,
        ):
            self.round = rows[0]["round"]
            yield [{**row, **self._success(run)} for run, row in zip(self.going, rows, strict=True)]

    def _success(self, run: Run) -> dict[str, float]:
        """Return the success rate of the attack on a run's model, if the attack has an aim and the
        round is evaluated.
        """
        if not self.begun.aims or not self.evaluation.is_due(self.round, self.job.rounds):
            return {}
        engine, rule = self._serial(self.begun.aims), replace(self.evaluation, metrics=(ACCURACY,))
        (measured,) = measure(engine, [(run.index, run.state)], rule, "test")
        return {SUCCESS_KEY: measured.values[ACCURACY.name]}

    @property
    def going(self) -> list[Run]:
        """The runs without an error."""
        return [run for run in self.runs if run.error is None]

    @property
    def facts(self) -> dict[str, Any]:
        """The engine's name and the choices it has made, for the record."""
        return {"name": type(self.engine).__name__.lower(), **self.engine.facts()}

    def snapshots(self) -> dict[int, Snapshot]:
        """Return a snapshot of each run without an error, after the last round that was played."""
        facts = self.engine.facts()
        return {
            run.index: Snapshot(
                self.round, run.state, run.costs, self.engine.memos_of(run.index), facts
            )
            for run in self.going
        }

    def confusions(self) -> dict[int, list[list[int]]]:
        """Return the confusion matrix of each run's model: the numbers of test examples by label
        (row) and prediction (column). There are none for tasks without classes.
        """
        if "classes" not in self.model.task.offers:
            return {}
        states = [(run.index, run.state) for run in self.going]
        classes = self.begun.federations[0].classes
        matrices = confusions(self._quiet_engine(), states, self.evaluation, classes)
        return {run: matrix for (run, _), matrix in zip(states, matrices, strict=True)}

    def _quiet_engine(self) -> Engine:
        """Return an engine for one more exchange: the serial one, since compiling does not pay for
        one exchange.
        """
        if self.engine.remote:  # the clients' memos are in other processes
            return self.engine
        return self._serial(self.begun.federations)

    def _serial(self, federations: Sequence[Federation]) -> Engine:
        plain = Serial(self.model, federations, self.begun.memos, self.job.dtype)
        for run in self.going:
            plain.restore(run.index, self.engine.memos_of(run.index))
        return plain
