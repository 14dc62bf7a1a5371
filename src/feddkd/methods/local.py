"""Local training, the exchange that most methods share (Algorithm 1, Client-LocalTrain): a method
adds its terms to the loss.

w <- optimiser(w, grad[ CE(f(w; x), y) + terms ]) over the client's mini-batches, from the weights
that were sent; the server takes the average of the w_k by examples.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor
from torch.func import grad

from feddkd.data.batches import Reads, Source
from feddkd.errors import InputError
from feddkd.method import (
    Batch,
    Collect,
    Fold,
    Method,
    Phase,
    Private,
    ServerFn,
    World,
    own_model,
    uploads,
)
from feddkd.methods.aggregation import PLAINLY, Gathering, gathered
from feddkd.methods.losses import Term, cross_entropy
from feddkd.methods.optimisers import Optimiser, adam, sgd
from feddkd.models.functional import Model, Output
from feddkd.spec.schedules import Rate, Schedule
from feddkd.spec.types import Count, Momentum, NonNegative, Positive
from feddkd.tensors import Groups, Tensors


@dataclass(frozen=True, kw_only=True)
class Local:
    """How a client trains: options that every method with local training takes."""

    epochs: Count = 5
    steps: Count | None = None  # so many mini-batches in place of epochs
    batch_size: Count = 64
    lr: Positive = 0.1
    lr_decay: Positive = 1.0  # per round
    optimiser: Literal["sgd", "adam"] = "sgd"
    momentum: Momentum = 0.0
    nesterov: bool = False
    weight_decay: NonNegative = 0.0
    beta1: Momentum = 0.9
    beta2: Momentum = 0.999
    eps: Positive = 1e-8
    amsgrad: bool = False
    drop_last: bool = False

    def build_optimiser(self) -> Optimiser:
        if self.optimiser == "sgd":
            return sgd(
                momentum=self.momentum, nesterov=self.nesterov, weight_decay=self.weight_decay
            )
        return adam(
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            amsgrad=self.amsgrad,
        )


Begin = Callable[[Model, Groups, Groups], Groups]  # (model, sent, memo) -> groups
Bend = Callable[[Tensors, Groups, Groups], Tensors]  # (gradient, sent, carry) -> direction
# (model, sent, carry, output, batch) -> groups
Watch = Callable[[Model, Groups, Groups, Output, Batch], Groups]
# (model, sent, carry, memo) -> (upload, memo)
Part = Callable[[Model, Groups, Groups, Groups], tuple[Groups, Groups]]


@dataclass(frozen=True)
class Variant:
    """Where a method departs from FedAvg's exchange; what is left out is FedAvg's.

    Groups come on top of params and buffers.
    """

    terms: tuple[Term, ...] = ()  # added to the loss
    # groups that ride in the carry: constants, counters, trackers
    begin: Begin = lambda model, sent, memo: {}
    # what the optimiser is given in place of the gradient
    bend: Bend = lambda gradient, sent, carry: gradient
    # those groups of `begin` that a step changes
    watch: Watch = lambda model, sent, carry, output, batch: {}
    # groups to upload and to keep, at the end
    part: Part = lambda model, sent, carry, memo: ({}, {})
    server: ServerFn | None = None  # in place of take_average
    collect: Mapping[str, Collect] = field(default_factory=dict)
    every: Mapping[str, str] = field(default_factory=dict)
    sends: tuple[str, ...] = ()
    rates: Mapping[str, Schedule] = field(default_factory=dict)
    keeps: frozenset[str] = frozenset()
    opens: Callable[[Model, Groups, World], Groups] | None = None
    brings: Callable[[Model, Groups, World], Groups] | None = None
    private: Private = "none"
    source: Source = "train"


FEDAVG = Variant()


def local_training(
    local: Local, variant: Variant = FEDAVG, gathering: Gathering = PLAINLY
) -> Method:
    """One exchange: train on labels, leave the trained model with the client (it may have to
    teach), average.

    `gathering` is for variants that upload their models and nothing else.
    """
    phase = Phase(
        name="local",
        client=_client(local.build_optimiser(), variant),
        server=variant.server or take_average,
        reads=Reads(
            local.batch_size,
            local.epochs,
            local.steps,
            source=variant.source,
            drop_last=local.drop_last,
        ),
        collect={
            "params": Collect.MEAN_BY_EXAMPLES,
            "buffers": Collect.MEAN_BY_EXAMPLES,
            **variant.collect,
        },
        every=variant.every,
        sends=("params", "buffers", *variant.sends),
        rates={"lr": Rate(local.lr, local.lr_decay), **variant.rates},
        leaves=frozenset({"model"}),
        keeps=variant.keeps,
        opens=variant.opens,
        brings=variant.brings,
    )
    return Method((gathered(phase, gathering),), frozenset({variant.private}))


def take_average(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
    """wbar = sum_k n_k / (sum_i n_i) w_k"""
    return {**state, "params": collected["params"], "buffers": collected["buffers"]}


def _client(optimiser: Optimiser, variant: Variant) -> Fold:
    def start(model: Model, sent: Groups, memo: Groups) -> Groups:
        params, buffers = own_model(model, sent, memo)
        return {
            "params": params,
            "buffers": buffers,
            **optimiser.init(params),
            **variant.begin(model, sent, memo),
        }

    def step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        def loss(w: Tensors) -> tuple[Tensor, Output]:
            output = model(w, carry["buffers"], batch.x, mode="train", key=batch.key)
            value = cross_entropy(output.logits, batch)
            for term in variant.terms:
                value = value + term(model, w, sent, carry, output, batch)
            return value, output

        gradient, output = grad(loss, has_aux=True)(carry["params"])
        direction = variant.bend(gradient, sent, carry)
        params, state = optimiser.update(carry["params"], direction, carry, sent["rates"]["lr"])
        watched = variant.watch(model, sent, carry, output, batch)
        return {**carry, "params": params, "buffers": output.buffers, **state, **watched}

    def finish(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
        upload, after = uploads(model, carry["params"], carry["buffers"], memo)
        more, kept = variant.part(model, sent, carry, memo)
        return {**upload, **more}, {
            **after,
            "model": {**carry["params"], **carry["buffers"]},
            **kept,
        }

    return Fold(start, step, finish)


# --- pieces that several variants share


def hold_private(model: Model, sent: Groups, memo: Groups) -> Groups:
    """A `begin` for terms that look at the model as it came: own_model(model, sent, carry) is that
    model at every step.
    """
    return {"private": memo.get("private", {})}


def reach(local: Local, method: str) -> tuple[Begin, Watch]:
    """carry["reach"]["a"]: how far the steps so far lead down a slope of one, in units of the
    learning rate.

    That is K after K steps of plain SGD, (K - rho (1 - rho^K) / (1 - rho)) / (1 - rho) with
    momentum rho, and exact for Nesterov.
    """
    if local.optimiser != "sgd":
        raise InputError(
            f"{method} weighs the steps of SGD; optimiser={local.optimiser!r} does not go with it"
        )

    def begin(model: Model, sent: Groups, memo: Groups) -> Groups:
        nothing = sent["rates"]["lr"].new_zeros(())
        return {"reach": {"a": nothing, "v": nothing}}

    def watch(model: Model, sent: Groups, carry: Groups, output: Output, batch: Batch) -> Groups:
        v = local.momentum * carry["reach"]["v"] + 1
        return {
            "reach": {
                "a": carry["reach"]["a"] + (1 + local.momentum * v if local.nesterov else v),
                "v": v,
            }
        }

    return begin, watch
