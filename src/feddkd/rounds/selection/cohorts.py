"""The cohorts of a round, and the exchange in which clients tell their loss.

Every client that is asked gets the shared model and sends back one number. This is one more
communication, and its bytes count.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.func import vmap

from feddkd.data.batches import Reads
from feddkd.engines.interface import Engine, Order, Reply
from feddkd.method import Batch, Collect, Exchange, Fold, Phase, own_model
from feddkd.models.functional import Model
from feddkd.rounds.selection.rule import Clients, Known, Selection, Statistic
from feddkd.rounds.turns import Run, Turn
from feddkd.tensors import Groups, bytes_of
from feddkd.trees import map_tensors

NOTES = "selection"  # group of the server's state


def opened(selection: Selection, clients: int) -> Groups:
    """Return the group of the server's state that holds what a selection notes."""
    zeros = {name: torch.zeros(clients, dtype=torch.float64) for name in selection.keeps}
    return {NOTES: zeros} if zeros else {}


def begin_round(
    engine: Engine, selection: Selection, runs: Sequence[Run], t: int, cohort: int
) -> list[Turn]:
    """Return the turn of each run in round t; selections that ask update its costs and state."""
    known = [_known(engine, run, t, cohort) for run in runs]
    drawn = [selection.draw(one) for one in known]
    asks = selection.asks
    losses = _ask(engine, asks, runs, t, drawn) if asks else [{} for _ in runs]
    turns = []
    for run, one, clients, answers in zip(runs, known, drawn, losses, strict=True):
        selected = selection.decide(one, clients, answers)
        if selection.keeps:
            notes = {n: torch.from_numpy(a).to(run.like.device) for n, a in selected.notes.items()}
            run.state = {**run.state, NOTES: notes}
        row = {"round": t, "clients": _sorted(selected.cohort)}
        if selection.asks:
            row["asked"] = _sorted(clients)
        turns.append(Turn(run, t, tuple(_sorted(selected.cohort)), row))
    return turns


def _sorted(clients: Clients) -> list[int]:
    return sorted(int(client) for client in clients)


def _known(engine: Engine, run: Run, t: int, cohort: int) -> Known:
    notes = {name: tensor.cpu().numpy() for name, tensor in run.state.get(NOTES, {}).items()}
    return Known(run.seed, t, engine.sizes(run.index), cohort, notes)


# --- asking


def _ask(
    engine: Engine, statistic: Statistic, runs: Sequence[Run], t: int, drawn: Sequence[Clients]
) -> list[dict[int, float]]:
    """Return what the clients of each run tell; those that tell no finite number are left out."""
    orders = []
    for run, clients in zip(runs, drawn, strict=True):
        sent = {group: run.state[group] for group in ("params", "buffers")}
        orders.append(Order(run.index, sent, tuple(_sorted(clients)), ("select", run.seed, t)))
    replies = engine.exchange(Exchange(asking(statistic)), orders)
    for run, order, reply in zip(runs, orders, replies, strict=True):
        costs = run.costs
        run.costs = replace(
            costs,
            communications=costs.communications + 1,
            bytes_up=costs.bytes_up + bytes_of(reply.collected),
            bytes_down=costs.bytes_down + len(order.cohort) * bytes_of(order.sent),
        )
    return [_told(reply) for reply in replies]


def _told(reply: Reply) -> dict[int, float]:
    if not reply.clients:
        return {}
    values = reply.collected["told"]["value"].tolist()
    pairs = zip(reply.clients, values, strict=True)
    return {client: value for client, value in pairs if math.isfinite(value)}


@lru_cache(maxsize=2)  # the same phase each time: engines recognise phases by identity
def asking(statistic: Statistic) -> Phase:
    """Return the phase in which a client tells a statistic of the losses on its examples."""

    def start(model: Model, sent: Groups, memo: Groups) -> Groups:
        params, buffers = own_model(model, sent, memo)
        zero = next(iter(params.values())).new_zeros((), dtype=torch.float64)
        return {"params": params, "buffers": buffers, "sums": {"loss": zero, "count": zero}}

    def step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        losses, counts = _losses(model, carry, batch, statistic)
        sums = carry["sums"]
        added = {"loss": sums["loss"] + losses, "count": sums["count"] + counts}
        return {**carry, "sums": added}

    def finish(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
        loss, count = carry["sums"]["loss"], carry["sums"]["count"].clamp(min=1)
        value = loss / count if statistic == "mean loss" else (count * loss).sqrt()
        return {"told": {"value": value}}, memo

    return Phase(
        name=f"tell {statistic}",
        client=Fold(start, step, finish),
        server=lambda model, state, collected, rates: state,
        reads=Reads(batch_size=1000, random=False),
        collect={"told": Collect.EVERY},
    )


def _losses(
    model: Model, carry: Groups, batch: Batch, statistic: Statistic
) -> tuple[Tensor, Tensor]:
    """Return the sum of a batch's losses, or of their squares, and how many there are."""
    output = model(carry["params"], carry["buffers"], batch.x, mode="eval", key=batch.key).logits
    task = model.task
    if statistic == "mean loss":
        shares = task.shares(batch.y, batch.share)
        count = (shares > 0).double().sum()
        return task.loss(output, batch.y, shares).double() * count, count

    def squared(one: Tensor, target: Tensor) -> Tensor:
        target = map_tensors(lambda tensor: tensor[None], target)
        return task.loss(one[None], target, task.shares(target, one.new_ones(1))).double().square()

    present = (batch.share > 0).double()
    return (vmap(squared)(output, batch.y) * present).sum(), present.sum()
