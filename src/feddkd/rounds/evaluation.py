"""Accuracy and loss by protocol; every number carries the name of its own.

Evaluation is an exchange like any other, a fold over a test set, so every engine can do it and
private tensors need not leave their client. The server takes part as one more client that holds the
validation and test sets.
"""

from collections.abc import Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from feddkd.data.batches import Reads, Source
from feddkd.data.federation import SERVER
from feddkd.engines.interface import Engine, Order
from feddkd.errors import ClientError, InputError, choices
from feddkd.method import Batch, Collect, Exchange, Fold, Method, Phase, own_model
from feddkd.methods.losses import cross_entropy
from feddkd.models.functional import Model
from feddkd.tensors import Groups, Tensors

TALLIES = ("correct", "loss", "count")


class Protocol(Enum):
    """Whose model is judged on which examples, and how that becomes one number."""

    GLOBAL = "the global model on the whole test set"
    CLIENT_MEAN = (
        "each client's model on its own test set (the whole test set where it has none of its own),"
        " mean over clients"
    )
    CLIENT_POOLED = "each client's model on its own test set, all examples pooled"


class Measured(NamedTuple):
    accuracy: float
    loss: float
    client_accuracy: list[float] | None  # client by client, where clients were asked


def fitting_protocol(method: Method, own_tests: bool) -> Protocol:
    """Client by client where the partition deals out test sets or the method has private tensors,
    else one global model.
    """
    return Protocol.CLIENT_MEAN if own_tests or method.personal else Protocol.GLOBAL


def find_protocol(name: str, method: Method, own_tests: bool) -> Protocol:
    """Return a protocol by its name; `auto` is the one that fits the method."""
    if name == "auto":
        return fitting_protocol(method, own_tests)
    known = {protocol.name.lower(): protocol for protocol in Protocol}
    if not isinstance(name, str) or name not in known:
        raise InputError(f"unknown evaluation {name!r}; there are: {choices(('auto', *known))}")
    protocol = known[name]
    if protocol is Protocol.GLOBAL and method.personal:
        raise InputError(
            f"evaluation='global' judges one shared model, and in {method} clients keep tensors of"
            " their own"
        )
    return protocol


def measure(
    engine: Engine, states: Sequence[tuple[int, Groups]], protocol: Protocol, source: Source
) -> list[Measured]:
    """Judge the model in each (run, state) on the validation or test set."""
    replies = engine.exchange(Exchange(PHASES[source]), _orders(engine, states, protocol))
    if not all(reply.clients for reply in replies):
        raise ClientError(f"nobody answered the evaluation on {source} examples")
    return [_summary(reply.collected["tally"], protocol) for reply in replies]


def confusions(
    engine: Engine, states: Sequence[tuple[int, Groups]], protocol: Protocol, classes: int
) -> list[list[list[int]]]:
    """For the model in each (run, state): how many test examples of a class (row) were taken for
    which (column).

    Where clients are judged one by one, over all of them together.
    """
    replies = engine.exchange(Exchange(counting(classes)), _orders(engine, states, protocol))
    return [reply.collected["tally"]["counts"].sum(0).long().tolist() for reply in replies]


def _orders(
    engine: Engine, states: Sequence[tuple[int, Groups]], protocol: Protocol
) -> list[Order]:
    orders = []
    for run, state in states:
        cohort = (SERVER,) if protocol is Protocol.GLOBAL else tuple(range(len(engine.sizes(run))))
        sent = {"params": state["params"], "buffers": state["buffers"]}
        orders.append(Order(run, sent, cohort, ("evaluate",)))
    return orders


def _summary(tally: Tensors, protocol: Protocol) -> Measured:
    """Tallies stacked over clients -> numbers. One transfer from the device."""
    correct, loss, count = (
        torch.stack([tally["correct"], tally["loss"], tally["count"]]).double().cpu()
    )
    by_client = None if protocol is Protocol.GLOBAL else (correct / count).tolist()
    if protocol is Protocol.CLIENT_MEAN:
        return Measured((correct / count).mean().item(), (loss / count).mean().item(), by_client)
    return Measured(
        (correct.sum() / count.sum()).item(), (loss.sum() / count.sum()).item(), by_client
    )


def _start(
    model: Model,
    sent: Groups,
    memo: Groups,
    names: Sequence[str] = TALLIES,
    shape: Sequence[int] = (),
) -> Groups:
    params, buffers = own_model(model, sent, memo)
    zeros = torch.zeros(
        tuple(shape), dtype=torch.float64, device=next(iter(params.values())).device
    )
    return {"params": params, "buffers": buffers, "tally": dict.fromkeys(names, zeros)}


def _logits(model: Model, carry: Groups, batch: Batch) -> Tensor:
    return model(carry["params"], carry["buffers"], batch.x, mode="eval", key=batch.key).logits


def _step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
    logits = _logits(model, carry, batch)
    present = (batch.share > 0).double()
    count = present.sum()
    tally = {
        "correct": carry["tally"]["correct"] + ((logits.argmax(-1) == batch.y) * present).sum(),
        "loss": carry["tally"]["loss"] + cross_entropy(logits, batch).double() * count,
        "count": carry["tally"]["count"] + count,
    }
    return {**carry, "tally": tally}


def counting(classes: int) -> Phase:
    def step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        logits = _logits(model, carry, batch)
        true = one_hot(batch.y, classes).double()
        # a network may have more outputs than there are classes: those have no column
        taken = one_hot(logits.argmax(-1), logits.shape[-1])[:, :classes].double()
        present = (batch.share > 0).double()
        return {
            **carry,
            "tally": {"counts": carry["tally"]["counts"] + (true * present[:, None]).T @ taken},
        }

    start = partial(_start, names=("counts",), shape=(classes, classes))
    return _phase("test", "count", Fold(start, step, _finish, sums=True))


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


JUDGING = Fold(_start, _step, _finish, sums=True)
PHASES: dict[Source, Phase] = {
    "validation": _phase("validation", "evaluate", JUDGING),
    "test": _phase("test", "evaluate", JUDGING),
}
