"""FedMA: Wang, Yurochkin, Sun, Papailiopoulos, Khazaeni, "Federated learning with matched
averaging", ICLR 2020, arXiv:2002.06440, Algorithm 1 and "FedMA with communication".

    for l = 1..L:  W^(l) = 1/m sum_k W_k^(l) Pi_k^T,  Pi_k by the Hungarian algorithm;  client k goes on from its own layers > l,
                   inputs of layer l+1 permuted by Pi_k, with layers <= l frozen at their matched
                   values

A round is one exchange a layer, as many as the network has: the first sends the whole model, each
later one the layer just matched and to every client its own permutation; up goes one layer at a
time. Training (the options of `local`) takes place in every exchange. The outputs of the last layer
are not permuted: output c is the average by the clients' numbers of examples of class c, as they
read them. A batch norm behind a layer moves with its units. `form="once"` matches all layers after
one local training.

Left out is the growth of the global model: the paper's Bayesian non-parametric prior may give it
more units than a client has, and clients then cut their models out of it. Here widths stay, the
limit of that prior in which no unit is ever added, so that its cost is the squared distance; the
paper's 1/m is `weights="clients"`, FedAvg's n_k `weights="examples"`. The published code, too,
sweeps five times over the clients, in random order; here in that of their weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from feddkd.errors import InputError, choices
from feddkd.method import Batch, Collect, Fold, Method, Part, Phase, World
from feddkd.methods.local import Local, local_training
from feddkd.methods.registry import METHODS
from feddkd.methods.unit_matching import matched_average
from feddkd.models.functional import Model
from feddkd.models.layer_chain import Layer, chain, move_inputs
from feddkd.spec.types import Whole
from feddkd.tensors import Groups, Tensors, only

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
    """Layer after layer, units matched before they are averaged: W^(l) = 1/m sum_k W_k^(l) Pi_k^T."""
    (phase,) = local_training(local).phases

    def unfolds(model: Model) -> tuple[Phase, ...]:
        layers = chain(model.net)
        cuts = range(len(layers)) if form == "layers" else (0,)
        stages = [
            Stage(layers, first, first + 1 if form == "layers" else len(layers), head)
            for first in cuts
        ]
        return tuple(
            _phase(phase, stage, partial(_server, stage, weights, sweeps)) for stage in stages
        )

    return Method((replace(phase, unfolds=unfolds),))


@dataclass(frozen=True)
class Stage:
    """One exchange of a round: the layers from `first` to before `stop` are matched at its end,
    those before are frozen.
    """

    layers: tuple[Layer, ...]
    first: int
    stop: int
    head: Literal["labels", "examples"]

    @property
    def matched(self) -> tuple[Layer, ...]:
        return self.layers[self.first : self.stop]

    @property
    def ends(self) -> bool:
        return self.stop == len(self.layers)

    @property
    def counts_labels(self) -> bool:
        return self.ends and self.head == "labels"


def _names(layers: Sequence[Layer]) -> frozenset[str]:
    return frozenset(name for layer in layers for name in layer.names)


def _phase(local: Phase, stage: Stage, server: "partial[Groups]") -> Phase:
    assert isinstance(local.client, Fold)
    begun = stage.first == 0
    return replace(
        local,
        name=f"layer {stage.first + 1}",
        client=_client(local.client, stage),
        server=server,
        collect={
            "layers": Collect.EVERY,
            **({"labels": Collect.EVERY} if stage.counts_labels else {}),
        },
        sends=("params", "buffers") if begun else (),
        parts=None if begun else partial(_hand_out, stage),
        needs=frozenset() if begun else frozenset({"model"}),
        unfolds=None,
        opens=_check_shared,
    )


def _check_shared(model: Model, state: Groups, world: World) -> Groups:
    if kept := model.param_names - state["params"].keys():
        raise InputError(
            "fedma matches the units of whole models, and clients keep some tensors:"
            f" {choices(kept)}"
        )
    return {}


# --- the client's half: local training, with some layers held


def _client(training: Fold, stage: Stage) -> Fold:
    frozen, labels = _names(stage.layers[: stage.first]), stage.layers[-1].units

    def start(model: Model, sent: Groups, memo: Groups) -> Groups:
        carry = training.start(
            model, sent if stage.first == 0 else {**sent, **_resume(model, stage, sent, memo)}, memo
        )
        weight = carry["params"][stage.layers[-1].weight]
        return (
            {**carry, "labels": {"count": weight.new_zeros(labels)}}
            if stage.counts_labels
            else carry
        )

    def step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        after = training.step(model, sent, carry, batch)
        held = {
            group: {**after[group], **only(carry[group], frozen)} for group in ("params", "buffers")
        }
        return {
            **after,
            **held,
            **({"labels": _count(carry["labels"], batch)} if stage.counts_labels else {}),
        }

    def finish(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
        upload, after = training.finish(model, sent, carry, memo)
        layers = only({**upload["params"], **upload["buffers"]}, _names(stage.matched))
        return {
            "layers": layers,
            **({"labels": carry["labels"]} if stage.counts_labels else {}),
        }, after

    return Fold(start, step, finish)


def _resume(model: Model, stage: Stage, sent: Groups, memo: Groups) -> Groups:
    """The client's own model, the layer just matched in it, and the next one reading the units in
    their new order.
    """
    layer = stage.layers[stage.first]
    moved = move_inputs(layer, memo["model"][layer.weight], sent["own"]["order"])
    w = {**memo["model"], **sent["matched"], layer.weight: moved}
    return {"params": only(w, model.param_names), "buffers": only(w, model.buffer_names)}


def _count(labels: Tensors, batch: Batch) -> Tensors:
    outputs = torch.arange(len(labels["count"]), device=batch.y.device)
    seen = (batch.y[:, None] == outputs) & (batch.share > 0)[:, None]
    return {"count": labels["count"] + seen.sum(0)}


# --- the server's half


def _hand_out(stage: Stage, state: Groups, cohort: tuple[int, ...], step: int) -> list[Part]:
    """To everybody the layer just matched, to each client the order in which its own units stand
    there.
    """
    layer = only(
        {**state["params"], **state["buffers"]}, _names(stage.layers[stage.first - 1 : stage.first])
    )
    orders = state["fedma"]["orders"]
    return [
        Part((client,), {"matched": layer, "own": {"order": o}})
        for client, o in zip(cohort, orders, strict=True)
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
    examples = rates["examples"].tolist()
    models = [
        {name: tensor[k] for name, tensor in collected["layers"].items()}
        for k in range(len(examples))
    ]
    by = examples if weights == "examples" else [1.0] * len(examples)
    head = _shares(stage, collected, rates["examples"]) if stage.ends else None
    average, orders = matched_average(stage.matched, models, by, sweeps, head)
    params = {**state["params"], **only(average, model.param_names)}
    buffers = {**state["buffers"], **only(average, model.buffer_names)}
    kept = {group: tensors for group, tensors in state.items() if group != "fedma"}
    permuted = {} if orders is None else {"fedma": {"orders": torch.stack(orders)}}
    return {**kept, "params": params, "buffers": buffers, **permuted}


def _shares(stage: Stage, collected: Groups, examples: Tensor) -> Tensor:
    """How much each client counts for each output: examples of that class, or of any where nobody
    has one of that class.
    """
    even = examples[:, None].expand(-1, stage.layers[-1].units)
    if not stage.counts_labels:
        return even
    counts = collected["labels"]["count"]
    return torch.where(counts.sum(0) > 0, counts, even.to(counts.dtype))
