"""Evaluation: metrics of models on validation and test sets, by a protocol.

Evaluation is an exchange like any other, a fold over a test set, so every engine can do it and
private tensors need not leave their client. The server takes part as one more client that holds the
validation and test sets.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from feddkd.data.batches import Reads, Source
from feddkd.data.federation import SERVER
from feddkd.engines.interface import Engine, Order, Reply
from feddkd.errors import ClientError, InputError, unknown
from feddkd.method import Batch, Collect, Exchange, Fold, Method, Phase, own_model, own_tensors
from feddkd.models.functional import Model
from feddkd.rounds.judging import ALWAYS, Judging
from feddkd.rounds.metrics import DEFAULT, LOSS, Metric
from feddkd.rounds.predictions import whole_values
from feddkd.tasks.labels import CLASSIFICATION
from feddkd.tasks.task import Task
from feddkd.tensors import Groups, Tensors
from feddkd.trees import Tree, map_tensors

Shapes = dict[str, tuple[int, ...]]  # sum -> its shape


class Protocol(Enum):
    """The models that are judged, their examples, and the way to one number."""

    GLOBAL = "the global model on the whole test set"
    CLIENT_MEAN = (
        "each client's model on its own test set (the whole test set where it has none of its own),"
        " mean over clients"
    )
    CLIENT_POOLED = "each client's model on its own test set, all examples pooled"


@dataclass(frozen=True, eq=False)
class Sample:
    """One example's output and target, with a first axis of length 1, and the task.

    They show the shapes of what metrics sum up.
    """

    output: Tensor
    target: Tree
    task: Task = CLASSIFICATION

    def sums(self, metrics: Sequence[Metric]) -> dict[str, Tensor]:
        """Return the sums of metrics over padding alone."""
        share = self.output.new_zeros(len(self.output))
        target = map_tensors(Tensor.cpu, self.target)
        padding = Batch((), target, share, torch.tensor(0))
        return _sums(self.task, metrics, self.output, padding)

    def check(self, metrics: Sequence[Metric]) -> None:
        """Raise InputError if a metric cannot be computed of such outputs and targets."""
        for metric in metrics:
            try:
                self.sums([metric])
            except Exception as error:
                reason = " ".join(str(error).split())
                raise InputError(
                    f"metric {metric.name!r} does not go with {self.task.title}: {reason}"
                ) from error


ONE_OF_TWO = Sample(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64))


class Measured(NamedTuple):
    """The metrics of one run's model on one set."""

    values: dict[str, float]  # metric -> value; NaN where it is not defined
    # metric -> values, None where a client is not judged; empty if the global model is judged
    by_client: dict[str, list[float | None]]
    is_finite: bool  # the loss is


def fitting_protocol(method: Method, own_tests: bool) -> Protocol:
    """Return the protocol of the clients' mean if the partition gives clients test sets or the
    method has private tensors, else that of one global model.
    """
    return Protocol.CLIENT_MEAN if own_tests or method.personal else Protocol.GLOBAL


def find_protocol(name: str, method: Method, own_tests: bool) -> Protocol:
    """Return a protocol by its name; `auto` is the one that fits the method."""
    if name == "auto":
        return fitting_protocol(method, own_tests)
    known = {protocol.name.lower(): protocol for protocol in Protocol}
    if not isinstance(name, str) or name not in known:
        raise unknown(f"unknown evaluation {name!r}", name, ("auto", *known))
    protocol = known[name]
    if protocol is Protocol.GLOBAL and not method.shares_all:
        raise InputError(
            f"evaluation='global' judges one shared model, but in {method} clients keep private"
            " tensors; use 'client_mean' or 'client_pooled'"
        )
    return protocol


def measure(
    engine: Engine,
    states: Sequence[tuple[int, Groups]],
    protocol: Protocol,
    source: Source,
    metrics: Sequence[Metric] = DEFAULT,
    sample: Sample = ONE_OF_TWO,
    rule: Judging = ALWAYS,
) -> list[Measured]:
    """Measure the model in each (run, state) on the validation or test set.

    The loss is always computed, as a sign of numbers that are not finite.
    """
    phase = judging(source, tuple(metrics), sample, protocol is Protocol.GLOBAL)
    orders = _orders(engine, states, protocol, rule)
    replies = engine.exchange(Exchange(phase), orders)
    if not all(reply.clients for reply in replies):
        raise ClientError(f"no client answered the evaluation on {source} examples")
    measured = []
    for reply, (run, state) in zip(replies, states, strict=True):
        found = _measured(reply, metrics, protocol, len(engine.sizes(run)))
        found.values.update(whole_values(engine, run, state, source, metrics))
        measured.append(found)
    return measured


def confusions(
    engine: Engine, states: Sequence[tuple[int, Groups]], protocol: Protocol, classes: int
) -> list[list[list[int]]]:
    """Return a confusion matrix for the model in each (run, state): the numbers of test examples by
    label (row) and prediction (column), summed over clients.
    """
    phase = counting(classes, protocol is Protocol.GLOBAL)
    replies = engine.exchange(Exchange(phase), _orders(engine, states, protocol))
    return [reply.collected["tally"]["counts"].sum(0).long().tolist() for reply in replies]


def _orders(
    engine: Engine,
    states: Sequence[tuple[int, Groups]],
    protocol: Protocol,
    rule: Judging = ALWAYS,
) -> list[Order]:
    orders = []
    for run, state in states:
        clients = rule.chosen(len(engine.sizes(run)))
        cohort = (SERVER,) if protocol is Protocol.GLOBAL else clients
        sent = {"params": state["params"], "buffers": state["buffers"]}
        orders.append(Order(run, sent, cohort, ("evaluate",)))
    return orders


# --- from sums to numbers


def _measured(
    reply: Reply, metrics: Sequence[Metric], protocol: Protocol, clients: int
) -> Measured:
    """Return the metrics of one run, from sums that are stacked over the clients that answered."""
    sums = _on_host(reply.collected["tally"])
    values = {metric.name: _value(metric, sums, protocol) for metric in metrics}
    loss = values.get(LOSS.name, _value(LOSS, sums, protocol))
    each = {
        name: _placed(reply.clients, found, clients)
        for name, found in _by_client(metrics, sums, protocol).items()
    }
    return Measured(values, each, math.isfinite(loss))


def _placed(answered: Sequence[int], values: Sequence[float], clients: int) -> list[float | None]:
    """Return the value of every client, None for clients that are not among those that answered."""
    by_client = dict(zip(answered, values, strict=True))
    return [by_client.get(client) for client in range(clients)]


def _on_host(tally: Tensors) -> dict[str, Tensor]:
    """Return the same tensors in the host's memory, by one transfer for all of them."""
    clients = len(next(iter(tally.values())))
    rows = [tensor.double().reshape(clients, -1).T for tensor in tally.values()]
    moved, end, found = torch.cat(rows).cpu(), 0, {}
    for (name, tensor), row in zip(tally.items(), rows, strict=True):
        begin, end = end, end + len(row)
        found[name] = moved[begin:end].T.contiguous().reshape(tensor.shape)
    return found


def _value(metric: Metric, sums: Tensors, protocol: Protocol) -> float:
    if metric.whole is not None:  # `whole_values` has it
        return math.nan
    own = _sums_of(metric, sums)
    if protocol is not Protocol.CLIENT_MEAN:
        return metric.value({name: tensor.sum(0) for name, tensor in own.items()}).item()
    each = metric.value(own)
    return (each.nanmean() if metric.skips_undefined else each.mean()).item()


def _by_client(
    metrics: Sequence[Metric], sums: Tensors, protocol: Protocol
) -> dict[str, list[float]]:
    if protocol is Protocol.GLOBAL:
        return {}
    return {
        metric.name: metric.value(_sums_of(metric, sums)).tolist()
        for metric in metrics
        if metric.by_client
    }


def _sums_of(metric: Metric, sums: Tensors) -> dict[str, Tensor]:
    """Return the sums of one metric, by the names it gave them."""
    prefix = f"{metric.name}."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in sums.items()
        if name.startswith(prefix)
    }


# --- the client's half


@lru_cache(maxsize=64)  # the same phase each time: engines recognise phases by identity
def judging(
    source: Source,
    metrics: tuple[Metric, ...] = DEFAULT,
    sample: Sample = ONE_OF_TWO,
    shared: bool = False,
) -> Phase:
    """Return the phase that adds up the sums of metrics on the validation or test set.

    `shared`: of the model sent, whatever else a client holds.
    """
    folded = (*metrics, *({LOSS} - set(metrics)))

    def step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        new = _sums(model.task, folded, _logits(model, carry, batch), batch)
        tally = {name: carry["tally"][name] + tensor for name, tensor in new.items()}
        return {**carry, "tally": tally}

    shapes = {name: tuple(tensor.shape) for name, tensor in sample.sums(folded).items()}
    start = partial(_start, shapes=shapes, shared=shared)
    return _phase(source, "evaluate", Fold(start, step, _finish, sums=True))


@lru_cache(maxsize=64)
def counting(classes: int, shared: bool = False) -> Phase:
    """Return the phase that counts test examples by label and prediction."""

    def step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        logits = _logits(model, carry, batch)
        true = one_hot(batch.y, classes).double()
        # a network may have more outputs than there are classes: those have no column
        taken = one_hot(logits.argmax(-1), logits.shape[-1])[:, :classes].double()
        present = (batch.share > 0).double()
        counts = carry["tally"]["counts"] + (true * present[:, None]).T @ taken
        return {**carry, "tally": {"counts": counts}}

    start = partial(_start, shapes={"counts": (classes, classes)}, shared=shared)
    return _phase("test", "count", Fold(start, step, _finish, sums=True))


def find_phase(name: str, metrics: tuple[Metric, ...], sample: Sample, classes: int) -> Phase:
    """Return the phase of an evaluation by its name, for clients in another process."""
    sources: tuple[Source, ...] = ("validation", "test")
    phases = [judging(source, metrics, sample) for source in sources]
    return next((phase for phase in phases if phase.name == name), counting(classes))


def _sums(task: Task, metrics: Sequence[Metric], output: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Return what a batch adds to the sums of all metrics; the loss is that of the task."""
    return {
        f"{metric.name}.{name}": tensor
        for metric in metrics
        for name, tensor in (
            _loss_sums(task, output, batch) if metric is LOSS else metric.sums(output, batch)
        ).items()
    }


def _loss_sums(task: Task, output: Tensor, batch: Batch) -> dict[str, Tensor]:
    shares = task.shares(batch.y, batch.share)
    count = (shares > 0).double().sum()
    return {"sum": task.loss(output, batch.y, shares).double() * count, "count": count}


def _start(model: Model, sent: Groups, memo: Groups, shapes: Shapes, shared: bool) -> Groups:
    kept = {} if shared else {"private": own_tensors(memo)}
    params, buffers = own_model(model, sent, kept)
    device = next(iter(params.values())).device
    tally = {
        name: torch.zeros(shape, dtype=torch.float64, device=device)
        for name, shape in shapes.items()
    }
    return {"params": params, "buffers": buffers, "tally": tally}


def _logits(model: Model, carry: Groups, batch: Batch) -> Tensor:
    return model(carry["params"], carry["buffers"], batch.x, mode="eval", key=batch.key).logits


def _finish(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
    return {"tally": carry["tally"]}, memo


def _phase(source: Source, name: str, client: Fold) -> Phase:
    return Phase(
        name=f"{name} on {source}",
        client=client,
        server=lambda model, state, collected, rates: state,
        reads=Reads(batch_size=1000, source=source, random=False),
        collect={"tally": Collect.EVERY},
    )
