"""Astraea: Duan, Liu, Chen, Tan, Ren, Qiao, Liang, "Astraea: self-balancing federated learning for
improving classification accuracy of mobile deep learning applications", ICCD 2019,
arXiv:1907.01132: rescheduling by mediators.

    mediator m: w_m <- w_t, then w_m <- local training of w_m at one client of m after another;   w_{t+1} = sum_m n_m/n w_m

Clients report how many examples of each label they hold, once, in the first round they take part
in. A mediator gathers up to gamma of a round's clients, one at a time that client whose labels,
pooled with those gathered, come nearest to uniform: the least KL(labels || U). The model passes
through its clients in that order, `passes` times (the paper's mediator epochs). Each hop is a
communication: it goes down to the client and comes up again.

Left out is the paper's other half, augmentation of the rare classes before training. gamma=5 and
passes=1 are defaults of ours.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from feddkd.data.batches import Reads
from feddkd.method import Batch, Collect, Fold, Method, Part, Phase, World
from feddkd.methods.local import Local, local_training
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model
from feddkd.spec.schedules import Repeat
from feddkd.spec.types import Count
from feddkd.tensors import Groups, Tensors, combine, weighted_mean


@METHODS.register
def astraea(local: Local, *, gamma: Count = 5, passes: Count = 1) -> Method:
    """Mediators pass the model through clients whose labels balance: w = sum_m n_m/n w_m, w_m
    trained at client after client.
    """
    (training,) = local_training(local).phases
    census = Phase(
        name="labels",
        client=Fold(_begin, _count, _report),
        server=_note,
        reads=Reads(4096, random=False),
        collect={"labels": Collect.EVERY},
        sends=(),
        parts=_unknown,
        keeps=frozenset({"labels"}),
        opens=_open,
        brings=lambda model, state, world: {
            "labels": {"count": torch.zeros(world.classes, dtype=torch.int64, device=_place(state))}
        },
    )
    hop = replace(
        training,
        server=_take_back,
        collect={"params": Collect.EVERY, "buffers": Collect.EVERY},
        sends=(),
        parts=partial(_pass_on, gamma),
        # a client's examples count once
        rates={**training.rates, "new": lambda round, step: float(step <= gamma)},
        repeat=Repeat(gamma * passes),
    )
    return Method((census, Phase("schedule", None, partial(_schedule, gamma)), hop))


def _place(state: Groups) -> torch.device:
    return next(iter(state["params"].values())).device


# --- who holds which labels


def _open(model: Model, state: Groups, world: World) -> Groups:
    return {
        "astraea": {
            "labels": torch.zeros(
                world.clients, world.classes, dtype=torch.int64, device=_place(state)
            )
        }
    }


def _bring(model: Model, state: Groups, world: World) -> Groups:
    return {
        "labels": {"count": torch.zeros(world.classes, dtype=torch.int64, device=_place(state))}
    }


def _unknown(state: Groups, cohort: tuple[int, ...], step: int) -> list[Part]:
    """Those who have not reported yet; nobody is asked twice."""
    known = state["astraea"]["labels"].sum(1).tolist()
    new = tuple(client for client in cohort if not known[client])
    return [Part(new, {})] if new else []


def _begin(model: Model, sent: Groups, memo: Groups) -> Groups:
    return {"labels": memo["labels"]}


def _count(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
    count = carry["labels"]["count"]
    labels = torch.arange(len(count), device=count.device)
    seen = (batch.y[:, None] == labels) & (batch.share > 0)[:, None]
    return {"labels": {"count": count + seen.sum(0)}}


def _report(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
    return {"labels": carry["labels"]}, memo


def _note(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
    labels = state["astraea"]["labels"].index_copy(
        0, rates["clients"], collected["labels"]["count"]
    )
    return {**state, "astraea": {**state["astraea"], "labels": labels}}


# --- who goes with whom


def _schedule(gamma: int, model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
    """Seats: row m holds mediator m's clients in their order, -1 where a seat stays empty.

    Every mediator gets the model.
    """
    clients = rates["clients"].tolist()
    groups = mediators(clients, state["astraea"]["labels"].double().cpu(), gamma)
    seats = torch.tensor(
        [group + [-1] * (gamma - len(group)) for group in groups], device=rates["clients"].device
    )

    def copies(group: Tensors) -> dict[str, Tensor]:
        return combine(lambda tensor: torch.stack([tensor] * len(groups)), group)

    return {
        **state,
        "astraea": {**state["astraea"], "seats": seats, "examples": torch.zeros_like(seats[:, 0])},
        "mediator_params": copies(state["params"]),
        "mediator_buffers": copies(state["buffers"]),
    }


def mediators(clients: Sequence[int], labels: Tensor, gamma: int) -> list[list[int]]:
    """Greedily: fill one mediator after another, always with the client that brings it nearest to
    uniform labels.
    """
    free, groups = list(clients), []
    while free:
        group: list[int] = []
        while free and len(group) < gamma:
            pooled = labels[group].sum(0)
            distances = {client: imbalance(pooled + labels[client]) for client in free}
            group.append(min(free, key=distances.__getitem__))
            free.remove(group[-1])
        groups.append(group)
    return groups


def imbalance(counts: Tensor) -> float:
    """KL(p || U) for p = counts / sum, up to the constant log of the number of labels"""
    p = counts / counts.sum()
    return float(torch.special.xlogy(p, p).sum())


# --- hops


def _pass_on(gamma: int, state: Groups, cohort: tuple[int, ...], step: int) -> list[Part]:
    """To the client in each mediator's next seat, the model as the one before left it."""
    seats = state["astraea"]["seats"][:, (step - 1) % gamma].tolist()
    return [Part((client,), _held(state, m)) for m, client in enumerate(seats) if client in cohort]


def _held(state: Groups, m: int) -> Groups:
    """Mediator m's model."""
    return {
        group: combine(lambda tensor: tensor[m], state[f"mediator_{group}"])
        for group in ("params", "buffers")
    }


def _take_back(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
    """Each mediator has its model back; their average by examples is the server's."""
    # client -> mediator
    whose = (
        (state["astraea"]["seats"][None] == rates["clients"][:, None, None]).any(2).int().argmax(1)
    )
    new = rates["examples"] * rates["new"].to(rates["examples"].dtype)
    examples = state["astraea"]["examples"].index_add(0, whose, new)
    held = {
        group: combine(
            lambda old, trained: old.index_copy(0, whose, trained),
            state[f"mediator_{group}"],
            collected[group],
        )
        for group in ("params", "buffers")
    }
    return {
        **state,
        **{group: weighted_mean(tensors, examples.tolist()) for group, tensors in held.items()},
        **{f"mediator_{group}": tensors for group, tensors in held.items()},
        "astraea": {**state["astraea"], "examples": examples},
    }
