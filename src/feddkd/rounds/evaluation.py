"""Evaluation: metrics of models on validation and test sets, by a protocol.

Evaluation is an exchange like any other, a fold over a test set, so every engine can do it and
private tensors need not leave their client. The server takes part as one more client that holds the
validation and test sets.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from feddkd.data.batches import Source
from feddkd.data.federation import SERVER
from feddkd.engines.interface import Engine, Order, Reply
from feddkd.errors import ClientError, InputError, unknown
from feddkd.method import Exchange, Method
from feddkd.randomness import generator
from feddkd.rounds.evaluation_phases import ONE_OF_TWO, Sample, counting, judging
from feddkd.rounds.metrics import DEFAULT, LOSS, Metric
from feddkd.rounds.predictions import whole_values
from feddkd.tensors import Groups, Tensors


class Protocol(Enum):
    """The models that are judged, their examples, and the way to one number."""

    GLOBAL = "the global model on the whole test set"
    CLIENT_MEAN = (
        "each client's model on its own test set (the whole test set where it has none of its own),"
        " mean over clients"
    )
    CLIENT_POOLED = "each client's model on its own test set, all examples pooled"


@dataclass(frozen=True)
class Evaluation:
    """The choice of models, metrics, rounds and clients that are evaluated.

    The first and the last round are always evaluated. The clients are the same in all rounds, runs
    and seeds, so that curves and methods can be compared.
    """

    protocol: Protocol = Protocol.GLOBAL
    metrics: Sequence[Metric] = DEFAULT
    every: int = 1  # of this many rounds one is evaluated
    clients: int | float = 1.0  # how many clients are evaluated, or which share of them
    among: frozenset[int] | None = None  # of those, only the ones that are in it; None: all
    sample: Sample = ONE_OF_TWO  # what one example's output and target look like

    @property
    def is_global(self) -> bool:
        """True if the global model is evaluated, and not a model of each client."""
        return self.protocol is Protocol.GLOBAL

    def is_due(self, round: int, last: int) -> bool:
        """Return True if a round is evaluated, where `last` is the last one."""
        return round in (1, last) or round % self.every == 0

    def chosen(self, clients: int) -> tuple[int, ...]:
        """Return the clients that are evaluated, in order."""
        wanted = self.clients if isinstance(self.clients, int) else round(self.clients * clients)
        drawn = list(range(clients))
        if wanted < clients:
            random = generator(("evaluated",))
            drawn = sorted(random.choice(clients, size=max(wanted, 1), replace=False).tolist())
        return tuple(k for k in drawn if self.among is None or k in self.among)


USUAL = Evaluation()


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
    evaluation: Evaluation,
    source: Source,
) -> list[Measured]:
    """Measure the model in each (run, state) on the validation or test set.

    The loss is always computed, as a sign of numbers that are not finite.
    """
    metrics = tuple(evaluation.metrics)
    phase = judging(source, metrics, evaluation.sample, evaluation.is_global)
    replies = engine.exchange(Exchange(phase), _orders(engine, states, evaluation))
    if not all(reply.clients for reply in replies):
        raise ClientError(f"no client answered the evaluation on {source} examples")
    measured = []
    for reply, (run, state) in zip(replies, states, strict=True):
        found = _measured(reply, metrics, evaluation.protocol, len(engine.sizes(run)))
        found.values.update(whole_values(engine, run, state, source, metrics))
        measured.append(found)
    return measured


def confusions(
    engine: Engine,
    states: Sequence[tuple[int, Groups]],
    evaluation: Evaluation,
    classes: int,
) -> list[list[list[int]]]:
    """Return a confusion matrix for the model in each (run, state): the numbers of test examples by
    label (row) and prediction (column), summed over clients.
    """
    phase = counting(classes, evaluation.is_global)
    replies = engine.exchange(Exchange(phase), _orders(engine, states, evaluation))
    return [reply.collected["tally"]["counts"].sum(0).long().tolist() for reply in replies]


def _orders(
    engine: Engine, states: Sequence[tuple[int, Groups]], evaluation: Evaluation
) -> list[Order]:
    orders = []
    for run, state in states:
        clients = evaluation.chosen(len(engine.sizes(run)))
        cohort = (SERVER,) if evaluation.is_global else clients
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
