"""Astraea: Duan, Liu, Chen, Tan, Ren, Qiao, Liang, "Astraea: self-balancing federated learning for
improving classification accuracy of mobile deep learning applications", ICCD 2019,
arXiv:1907.01132: rescheduling by mediators.

    mediator m: w_m <- w_t, then w_m <- local training of w_m at one client of m after another
    server:     w_{t+1} = sum_m n_m / (sum_i n_i) w_m

Clients report the number of their examples of each label, once, in the first round in which they
take part. A mediator takes up to gamma clients of a round. It takes them one at a time, always the
client that gives the pooled labels the least KL(labels || U), U uniform. The model passes through
the clients in that order, `passes` times (the paper's mediator epochs). Each hop is one
communication: the model goes down to the client and comes up again.

The other half of the paper, augmentation of rare classes before training, is not included. The
defaults gamma=5 and passes=1 are ours.
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
    """Mediators pass the model along clients whose labels balance: w = sum_m n_m/n w_m."""
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
        brings=_bring,
        requires=frozenset({"labels"}),
    )
    hop = replace(
        training,
        server=_take_back,
        collect={"params": Collect.EVERY, "buffers": Collect.EVERY},
        sends=(),
        parts=partial(_pass_on, gamma),
        # 1 in the first pass: a client's examples count once
        rates={**training.rates, "new": lambda round, step: float(step <= gamma)},
        repeat=Repeat(gamma * passes),
    )
    return Method((census, Phase("schedule", None, partial(_schedule, gamma)), hop))


def _zero_counts(state: Groups, *shape: int) -> Tensor:
    device = next(iter(state["params"].values())).device
    return torch.zeros(*shape, dtype=torch.int64, device=device)


# --- clients report their labels


def _open(model: Model, state: Groups, world: World) -> Groups:
    """Return a table of label counts, a row for each client."""
    return {"astraea": {"labels": _zero_counts(state, world.clients, world.classes)}}


def _bring(model: Model, state: Groups, world: World) -> Groups:
    """Return a client's label counts before it has read its examples."""
    return {"labels": {"count": _zero_counts(state, world.classes)}}


def _unknown(state: Groups, cohort: tuple[int, ...], step: int) -> list[Part]:
    """Return the clients that have not reported yet, as the part of the cohort to ask."""
    counted = state["astraea"]["labels"].sum(1).tolist()
    new = tuple(client for client in cohort if not counted[client])
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
    """Write the reported counts into the table."""
    labels = state["astraea"]["labels"].index_copy(
        0, rates["clients"], collected["labels"]["count"]
    )
    return {**state, "astraea": {**state["astraea"], "labels": labels}}


# --- the server assigns clients to mediators


def _schedule(gamma: int, model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
    """Assign the clients of the round to mediators, and give every mediator a copy of the model.

    Row m of "seats" holds the clients of mediator m in their order, then -1 for empty seats.
    """
    clients = rates["clients"].tolist()
    groups = mediators(clients, state["astraea"]["labels"].double().cpu(), gamma)
    rows = [group + [-1] * (gamma - len(group)) for group in groups]
    seats = torch.tensor(rows, device=rates["clients"].device)

    def copies(group: Tensors) -> dict[str, Tensor]:
        return combine(lambda tensor: torch.stack([tensor] * len(groups)), group)

    return {
        **state,
        "astraea": {**state["astraea"], "seats": seats, "examples": torch.zeros_like(seats[:, 0])},
        "mediator_params": copies(state["params"]),
        "mediator_buffers": copies(state["buffers"]),
    }


def mediators(clients: Sequence[int], labels: Tensor, gamma: int) -> list[list[int]]:
    """Return the clients of each mediator, chosen greedily.

    One mediator after another takes, until it has gamma clients, the client that makes its pooled
    labels most uniform.
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
    """Return KL(p || U), p = counts / sum, minus the constant log(number of labels)."""
    p = counts / counts.sum()
    return float(torch.special.xlogy(p, p).sum())


# --- hops from client to client


def _pass_on(gamma: int, state: Groups, cohort: tuple[int, ...], step: int) -> list[Part]:
    """Send each mediator's model to the client in its next seat."""
    seats = state["astraea"]["seats"][:, (step - 1) % gamma].tolist()
    return [
        Part((client,), _model_of(state, m)) for m, client in enumerate(seats) if client in cohort
    ]


def _model_of(state: Groups, m: int) -> Groups:
    """Return the model of mediator m."""
    return {
        group: combine(lambda tensor: tensor[m], state[f"mediator_{group}"])
        for group in ("params", "buffers")
    }


def _take_back(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
    """Give each mediator its trained model; the shared model is their average by examples."""
    seats = state["astraea"]["seats"]
    # the mediator of each client that answered
    whose = (seats[None] == rates["clients"][:, None, None]).any(2).int().argmax(1)
    new = rates["examples"] * rates["new"].to(rates["examples"].dtype)
    examples = state["astraea"]["examples"].index_add(0, whose, new)

    def replaced(old: Tensor, trained: Tensor) -> Tensor:
        return old.index_copy(0, whose, trained)

    after = {**state, "astraea": {**state["astraea"], "examples": examples}}
    for group in ("params", "buffers"):
        models = combine(replaced, state[f"mediator_{group}"], collected[group])
        after[f"mediator_{group}"] = models
        after[group] = weighted_mean(models, examples.tolist())
    return after
