"""FedMA: Wang, Yurochkin, Sun, Papailiopoulos, Khazaeni, "Federated learning with matched
averaging", ICLR 2020, arXiv:2002.06440, Algorithm 1 and "FedMA with communication".

    for l = 1..L:  W^(l) = 1/m sum_k W_k^(l) Pi_k^T,   Pi_k by the Hungarian algorithm
                   then client k trains its own layers > l, with the inputs of layer l+1 permuted
                   by Pi_k and the layers <= l fixed at their matched values

A round has one exchange for each layer. The first sends the whole model; each later one sends the
layer that was just matched, and to every client its permutation. Clients upload one layer at a
time. They train (with the options of `local`) in every exchange. The outputs of the last layer are
not permuted: output c is the average with weights by the number of examples of class c that each
client read. A batch norm behind a layer is permuted with its units. `form="once"` matches all
layers after one local training.

Growth of the global model is not included: with the paper's Bayesian non-parametric prior it may
get more units than a client has, and clients then cut their models out of it. Here the widths stay
fixed. This is the limit of the prior in which no unit is added, and its cost is the squared
distance. The paper's 1/m is `weights="clients"`, FedAvg's n_k is `weights="examples"`. The
published code also sweeps five times over the clients, but in random order; here the order is that
of their weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Literal

import torch
from torch import Tensor

from feddkd.errors import InputError, choices
from feddkd.method import Batch, Collect, Fold, Method, Part, Phase, World
from feddkd.methods.local import Local, local_training
from feddkd.methods.losses import CLASSES
from feddkd.methods.registry import METHODS
from feddkd.methods.unit_matching import matched_average
from feddkd.models.functional import Model
from feddkd.models.layer_chain import Layer, chain, move_inputs
from feddkd.spec.types import Whole
from feddkd.tasks.task import Offer
from feddkd.tensors import Groups, Tensors, combine, only

Weights = Literal["clients", "examples"]


@METHODS.register
def fedma(
    local: Local,
    *,
    form: Literal["layers", "once"] = "layers",
    weights: Weights = "clients",
    head: Literal["labels", "examples"] = "labels",
    sweeps: Whole = 5,
) -> Method:
    """Layer by layer, average of matched units: W^(l) = 1/m sum_k W_k^(l) Pi_k^T."""
    (phase,) = local_training(local).phases

    def unfolds(model: Model) -> tuple[Phase, ...]:
        layers = chain(model.net)
        if form == "once":
            stages = [Stage(layers, 0, len(layers), head)]
        else:
            stages = [Stage(layers, first, first + 1, head) for first in range(len(layers))]
        return tuple(
            _phase(phase, stage, partial(_server, stage, weights, sweeps)) for stage in stages
        )

    requires = CLASSES if head == "labels" else frozenset[Offer]()
    return Method((replace(phase, unfolds=unfolds, requires=requires),))


@dataclass(frozen=True)
class Stage:
    """One exchange of a round: it matches layers[first:stop]; the layers before are fixed."""

    layers: tuple[Layer, ...]
    first: int
    stop: int
    head: Literal["labels", "examples"]

    @property
    def matched(self) -> tuple[Layer, ...]:
        """Return the layers that this exchange matches."""
        return self.layers[self.first : self.stop]

    @property
    def ends(self) -> bool:
        """Return True if this exchange includes the last layer."""
        return self.stop == len(self.layers)

    @property
    def counts_labels(self) -> bool:
        """Return True if the clients count the labels that they read."""
        return self.ends and self.head == "labels"


def _names(layers: Sequence[Layer]) -> frozenset[str]:
    return frozenset(name for layer in layers for name in layer.names)


def _phase(local: Phase, stage: Stage, server: "partial[Groups]") -> Phase:
    """Return the phase of local training, changed to one exchange of FedMA."""
    assert isinstance(local.client, Fold)
    first = stage.first == 0
    groups = ("layers", "labels") if stage.counts_labels else ("layers",)
    return replace(
        local,
        name=f"layer {stage.first + 1}",
        client=_client(local.client, stage),
        server=server,
        collect=dict.fromkeys(groups, Collect.EVERY),
        sends=("params", "buffers") if first else (),
        parts=None if first else partial(_hand_out, stage),
        needs=frozenset() if first else frozenset({"model"}),
        unfolds=None,
        opens=_check_shared,
    )


def _check_shared(model: Model, state: Groups, world: World) -> Groups:
    """Raise InputError if clients keep some parameters."""
    if kept := model.param_names - state["params"].keys():
        raise InputError(
            "fedma matches the units of whole models, and clients keep these tensors:"
            f" {choices(kept)}"
        )
    return {}


# --- the client's half: local training with some layers fixed


def _client(training: Fold, stage: Stage) -> Fold:
    """Return local training in which the layers before `stage` do not change."""
    fixed, labels = _names(stage.layers[: stage.first]), stage.layers[-1].units

    def start(model: Model, sent: Groups, memo: Groups) -> Groups:
        if stage.first > 0:
            sent = {**sent, **_resume(model, stage, sent, memo)}
        carry = training.start(model, sent, memo)
        if not stage.counts_labels:
            return carry
        weight = carry["params"][stage.layers[-1].weight]
        return {**carry, "labels": {"count": weight.new_zeros(labels)}}

    def step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        after = dict(training.step(model, sent, carry, batch))
        for group in ("params", "buffers"):
            after[group] = {**after[group], **only(carry[group], fixed)}
        if stage.counts_labels:
            after["labels"] = _count(carry["labels"], batch)
        return after

    def finish(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
        upload, after = training.finish(model, sent, carry, memo)
        layers = only({**upload["params"], **upload["buffers"]}, _names(stage.matched))
        counts = {"labels": carry["labels"]} if stage.counts_labels else {}
        return {"layers": layers, **counts}, after

    return Fold(start, step, finish)


def _resume(model: Model, stage: Stage, sent: Groups, memo: Groups) -> Groups:
    """Return the client's own model with the layer that was just matched.

    The next layer reads that layer's units in their new order.
    """
    layer = stage.layers[stage.first]
    moved = move_inputs(layer, memo["model"][layer.weight], sent["own"]["order"])
    w = {**memo["model"], **sent["matched"], layer.weight: moved}
    return {"params": only(w, model.param_names), "buffers": only(w, model.buffer_names)}


def _count(labels: Tensors, batch: Batch) -> Tensors:
    """Return the counts of labels with those of a batch added."""
    outputs = torch.arange(len(labels["count"]), device=batch.y.device)
    seen = (batch.y[:, None] == outputs) & (batch.share > 0)[:, None]
    return {"count": labels["count"] + seen.sum(0)}


# --- the server's half


def _hand_out(stage: Stage, state: Groups, cohort: tuple[int, ...], step: int) -> list[Part]:
    """Send all clients the layer that was just matched, and each client the order of its units."""
    previous = stage.layers[stage.first - 1]
    layer = only({**state["params"], **state["buffers"]}, _names([previous]))
    orders = state["fedma"]["orders"]
    return [
        Part((client,), {"matched": layer, "own": {"order": order}})
        for client, order in zip(cohort, orders, strict=True)
    ]


def _server(
    stage: Stage,
    weights: Weights,
    sweeps: int,
    model: Model,
    state: Groups,
    collected: Groups,
    rates: Tensors,
) -> Groups:
    """Match the units of the uploaded layers, and put their average into the shared model."""
    examples = rates["examples"].tolist()
    models = [combine(itemgetter(k), collected["layers"]) for k in range(len(examples))]
    client_weights = examples if weights == "examples" else [1.0] * len(examples)
    head = _shares(stage, collected, rates["examples"]) if stage.ends else None
    average, orders = matched_average(stage.matched, models, client_weights, sweeps, head)
    after = {group: tensors for group, tensors in state.items() if group != "fedma"}
    after["params"] = {**state["params"], **only(average, model.param_names)}
    after["buffers"] = {**state["buffers"], **only(average, model.buffer_names)}
    if orders is not None:
        after["fedma"] = {"orders": torch.stack(orders)}
    return after


def _shares(stage: Stage, collected: Groups, examples: Tensor) -> Tensor:
    """Return the weight of each client (rows) for each output (columns) of the last layer.

    It is the client's number of examples of that class. If no client has any of that class, or if
    labels are not counted, it is the number of all its examples.
    """
    totals = examples[:, None].expand(-1, stage.layers[-1].units)
    if not stage.counts_labels:
        return totals
    counts = collected["labels"]["count"]
    return torch.where(counts.sum(0) > 0, counts, totals.to(counts.dtype))
