"""A job before its first round: its parts are checked, and its first states made."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from feddkd.data.federation import Federation, together
from feddkd.engines.memory import free_memory
from feddkd.method import World
from feddkd.models.functional import Model
from feddkd.models.proof import FEW, prove
from feddkd.rounds.demands import check_demands
from feddkd.rounds.evaluation_phases import Sample
from feddkd.rounds.job_checks import (
    check_batches,
    check_classes,
    check_computes,
    check_counted,
    check_models_left,
    check_public,
    warn_of_nothing_private,
)
from feddkd.rounds.loop import Run
from feddkd.rounds.selection.cohorts import opened
from feddkd.simulation.job import Job
from feddkd.tasks.task import check_offers
from feddkd.tensors import Groups, Tensors, to
from feddkd.trees import Tree, first_tensor, take, tensors_of


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
    _check(job)
    federations = together(
        [
            job.attack.federation(start.federation, start.seed)
            .to(device)
            .for_task(job.model.task, job.dtype)
            for start in job.starts
        ]
    )
    model, runs, memos = job.model.on(device, job.dtype), list[Run](), list[Groups]()
    for index, (start, federation) in enumerate(zip(job.starts, federations, strict=True)):
        params, buffers = (to(group, device, job.dtype) for group in (start.params, start.buffers))
        if index == 0:
            federation.transform.check(federation.x)
            tried = federation.transform(_few(federation.x), job.dtype)
            model = prove(model, params, buffers, tried)
        sample = _check_fit(model, params, buffers, federation, job)
        world = _world(start.seed, federation, sample, job.dtype)
        state, memo = job.method.start(model, params, buffers, world)
        check_demands(
            job.method.fitted(model),
            state["params"],
            job.cohort_size,
            federation.sizes,
            free_memory(device),
        )
        state = {**state, **opened(job.selection, job.clients)}
        like = next(iter(params.values()), torch.zeros(()))
        validates = len(federation.validation) > 0
        runs.append(Run(index, start.seed, state, validates, empty=like.new_zeros(())))
        memos.append(memo)
    malicious = [
        job.attack.first_memos(memo, job.clients, start.seed)
        for memo, start in zip(memos, job.starts, strict=True)
    ]
    aims = job.attack.aims(federations)
    return Begun(model, federations, runs, memos, sample, malicious, aims)


def _check(job: Job) -> None:
    """Raise InputError if parts of a job do not fit together, whatever its data."""
    task = job.model.task
    check_computes(job.method)
    job.method.check_order()
    job.method.check_task(task)
    if job.diagnostics:
        check_offers(task, frozenset({"classes"}), "diagnostics")
        check_models_left(job.method)
    job.tolerance.availability.check(job.method.fitted(job.model), job.clients)
    job.attack.check_fits(job.method, task, job.clients)
    job.selection.check_fits(job.method, job.clients, job.cohort_size)


def _world(seed: int, federation: Federation, sample: Sample, dtype: torch.dtype) -> World:
    """Return what a method may know when it makes its first state."""
    shape = sample.output.shape[1:]
    return World(
        ("method", seed),
        len(federation.train),
        federation.classes,
        len(federation.public),
        shape.numel(),
        tuple(shape),
        example=take(federation.transform(take(federation.x, slice(1)), dtype), 0),
    )


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
    the task, the metrics or the method. Only a call of the network shows its output.
    """
    x, key = federation.transform(take(federation.x, slice(FEW)), job.dtype), torch.tensor(0)
    with torch.no_grad():
        key = key.to(federation.device)
        output = model(params, buffers, x, mode="eval", key=key).logits
    if "classes" in model.task.offers and output.ndim == 2:
        check_classes(output, federation.classes)
    model.task.check_fit(federation.x, output, federation.y)
    sample = Sample(output[:1].cpu(), take(federation.y, slice(1)), model.task)
    sample.check(job.evaluation.metrics)
    check_counted(federation)
    check_public(job.method, federation)
    whole = job.cohort_size == job.clients
    check_batches(model, params, buffers, federation, job.method, job.dtype, whole)
    warn_of_nothing_private(model, job.method)
    return sample
