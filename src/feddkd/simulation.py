"""A job on an engine. Every part of the package that simulates rounds does so by a `Simulation`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

from feddkd.data.federation import Federation, together
from feddkd.engines.interface import Engine, EngineFactory
from feddkd.engines.memory import free_memory
from feddkd.engines.select import find_device, open_engine
from feddkd.engines.serial import Serial
from feddkd.errors import InputError, RunError
from feddkd.method import Method, World
from feddkd.methods.aggregation import with_secret_noise
from feddkd.models.functional import Model
from feddkd.models.proof import FEW, prove
from feddkd.rounds.attacks import NO_ATTACK, Attack
from feddkd.rounds.attacks.success import success
from feddkd.rounds.availability import Tolerance
from feddkd.rounds.costs import Costs
from feddkd.rounds.demands import check_demands
from feddkd.rounds.evaluation import Protocol, confusions
from feddkd.rounds.evaluation_phases import Sample
from feddkd.rounds.example_groups import GroupMeasure
from feddkd.rounds.job_checks import (
    check_batches,
    check_classes,
    check_public,
    warn_of_nothing_private,
)
from feddkd.rounds.judging import ALWAYS, Judging
from feddkd.rounds.loop import PATIENT, Row, Run, cohort_size, play
from feddkd.rounds.metrics import DEFAULT, Metric
from feddkd.rounds.privacy import ledger
from feddkd.rounds.remarks import remark_on_batches
from feddkd.rounds.selection import UNIFORM, Selection
from feddkd.rounds.selection.cohorts import opened
from feddkd.tasks.task import check_offers
from feddkd.tensors import Groups, Tensors, to
from feddkd.trees import Tree, first_tensor, take, tensors_of

DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Start(NamedTuple):
    """The start of one run: its seed, its data and its first weights."""

    seed: int
    federation: Federation
    params: Tensors
    buffers: Tensors


@dataclass(frozen=True)
class Job:
    """One method on one network, with one or more runs (seeds) in lock-step."""

    model: Model
    method: Method
    starts: Sequence[Start]
    dtype: torch.dtype = torch.float32
    rounds: int = 1
    cohort: int | float = 1.0
    protocol: Protocol = Protocol.GLOBAL
    metrics: Sequence[Metric] = DEFAULT
    tolerance: Tolerance = PATIENT
    judging: Judging = ALWAYS
    diagnostics: bool = False
    selection: Selection = UNIFORM
    attack: Attack = NO_ATTACK  # `method` must be attack.on(method)
    delta: float | None = None  # goes with the epsilon that methods with noise report

    @property
    def clients(self) -> int:
        """The number of clients, K."""
        return len(self.starts[0].federation.train)

    @property
    def cohort_size(self) -> int:
        """The number of clients in a cohort, m; raises an InputError if there are too few."""
        return cohort_size(self.cohort, self.clients, self.tolerance.min_clients)


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
        self.engine = open_engine(
            engine, self.model, self.begun.federations, self.begun.memos, job.dtype, options or {}
        )
        self._by_group = GroupMeasure(
            self.model,
            self.begun.federations,
            self.begun.memos,
            job.dtype,
            job.protocol,
            job.metrics,
            self.begun.sample,
            job.judging,
        )
        try:
            self._check()
            self._by_group.check(self.engine)
            self._restore(resume)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free what the engine holds."""
        self.engine.close()

    def _check(self) -> None:
        if self.engine.remote and self.job.attack.aim and self.job.protocol is not Protocol.GLOBAL:
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

        whole = [metric.name for metric in self.job.metrics if metric.whole is not None]
        if whole and (self.engine.remote or self.job.protocol is not Protocol.GLOBAL):
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
            protocol=job.protocol,
            metrics=job.metrics,
            sample=self.begun.sample,
            diagnostics=job.diagnostics,
            first=first,
            tolerance=job.tolerance,
            judging=job.judging,
            selection=job.selection,
            by_group=self._by_group,
        ):
            self.round = rows[0]["round"]
            yield [{**row, **self._success(run)} for run, row in zip(self.going, rows, strict=True)]

    def _success(self, run: Run) -> dict[str, float]:
        """Return the success rate of the attack on a run's model, if the attack has an aim."""
        if not self.begun.aims:
            return {}
        engine = self._serial(self.begun.aims)
        return success(engine, run, self.job.protocol, self.begun.sample)

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
        matrices = confusions(self._quiet_engine(), states, self.job.protocol, classes)
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


class Begun(NamedTuple):
    """A job before its first round, on a device."""

    model: Model  # compared with the network: both compute the same
    federations: list[Federation]
    runs: list[Run]
    memos: list[Groups]  # the first memo of the clients, for each run
    sample: Sample  # what one example's output and target look like
    malicious: list[Mapping[int, Groups]]  # the first memos that differ from these
    aims: list[Federation]  # their test examples call for what the attack aims at, if at anything


def begin(job: Job, device: torch.device) -> Begun:
    """Return a job before its first round; raise an InputError if its parts do not fit together."""
    task = job.model.task
    job.method.check_order()
    job.method.check_task(task)
    if job.diagnostics:
        check_offers(task, frozenset({"classes"}), "diagnostics")
    job.tolerance.availability.check(job.method.fitted(job.model), job.clients)
    job.attack.check_fits(job.method, task, job.clients)
    job.selection.check_fits(job.method, job.clients, job.cohort_size)
    federations = together(
        [
            job.attack.federation(start.federation, start.seed).to(device).for_task(task, job.dtype)
            for start in job.starts
        ]
    )
    model, runs, memos = job.model.on(device, job.dtype), list[Run](), list[Groups]()
    malicious = list[Mapping[int, Groups]]()
    for index, (start, federation) in enumerate(zip(job.starts, federations, strict=True)):
        params, buffers = (to(group, device, job.dtype) for group in (start.params, start.buffers))
        if index == 0:
            federation.transform.check(federation.x)
            tried = federation.transform(_few(federation.x), job.dtype)
            model = prove(model, params, buffers, tried)
        sample = _check_fit(model, params, buffers, federation, job)
        check_public(job.method, federation)
        check_batches(model, params, buffers, federation, job.method, job.dtype)
        warn_of_nothing_private(model, job.method)
        world = World(
            ("method", start.seed),
            len(federation.train),
            federation.classes,
            len(federation.public),
            sample.output.shape[1:].numel(),
            tuple(sample.output.shape[1:]),
        )
        state, memo = job.method.start(model, params, buffers, world)
        validates, like = (
            len(federation.validation) > 0,
            next(iter(params.values()), torch.zeros(())),
        )
        check_demands(
            job.method.fitted(model),
            state["params"],
            job.cohort_size,
            federation.sizes,
            free_memory(device),
        )
        state = {**state, **opened(job.selection, job.clients)}
        runs.append(Run(index, start.seed, state, validates, empty=like.new_zeros(())))
        memos.append(memo)
        malicious.append(job.attack.first_memos(memo, job.clients, start.seed))
    aims = job.attack.aims(federations)
    return Begun(model, federations, runs, memos, sample, malicious, aims)


def _few(x: Tree) -> Tree:
    """Return a few examples to try a network on. Of tokens these contain the smallest and the
    largest, which the network may not know.
    """
    extremes: list[int] = []
    for tensor in tensors_of(x):
        if tensor.dtype == torch.int64:
            rows = tensor.flatten(1) if tensor.dim() > 1 else tensor[:, None]
            extremes += [int(rows.amin(1).argmin()), int(rows.amax(1).argmax())]
    count = min(max(FEW - len(extremes), 1), len(first_tensor(x)))
    return take(x, [*extremes, *range(count)] if extremes else slice(FEW))


def _check_fit(
    model: Model, params: Tensors, buffers: Tensors, federation: Federation, job: Job
) -> Sample:
    """Return what one example's output and target look like; raise InputError if they do not fit
    the task or the metrics. Only a call of the network shows its output.
    """
    x, key = federation.transform(take(federation.x, slice(FEW)), job.dtype), torch.tensor(0)
    with torch.no_grad():
        key = key.to(federation.device)
        output = model(params, buffers, x, mode="eval", key=key).logits
    if "classes" in model.task.offers and output.ndim == 2:
        check_classes(output, federation.classes)
    model.task.check_fit(federation.x, output, federation.y)
    sample = Sample(output[:1].cpu(), take(federation.y, slice(1)), model.task)
    sample.check(job.metrics)
    return sample
