"""APFL: Deng, Kamani, Mahdavi, "Adaptive personalized federated learning", arXiv:2003.13461.

    w_k <- w_k - lr grad f_k(w_k)
    v_k <- v_k - lr alpha_k grad f_k(u_k),   u_k = alpha_k v_k + (1 - alpha_k) w_k
    alpha_k <- alpha_k - lr <grad f_k(u_k), v_k - w_k>,   in the first step of a round
    w_{t+1} = mean_k w_k;   client k is judged by u_k

A client mixes its own model v_k with its copy w_k of the shared one; all gradients of a step are on
one mini-batch. alpha_k stays in [0, 1] and is updated once in a round, before the first step of v_k
uses it; `adaptive=False` keeps it at `alpha`. u_k is the mixture at the end of the client's local
training. The mean has equal weights of the clients, as in the paper. The mixture is one of weights;
the authors' code mixes outputs. `evaluation="global"` judges the shared model.
"""

from functools import partial
from typing import Annotated

import torch

from feddkd.method import Batch, Collect, Method, World
from feddkd.methods.local import Local, Variant, local_training
from feddkd.methods.personal import OwnModel, bring_personal, shared_tensors, slope_at
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model, Output
from feddkd.spec.types import Bound
from feddkd.tensors import Groups, Tensors, combine

Mixture = Annotated[float, Bound(least=0, most=1)]


@METHODS.register
def apfl(local: Local, *, alpha: Mixture = 0.5, adaptive: bool = True) -> Method:
    """FedAvg, and mixtures u_k = alpha_k v_k + (1 - alpha_k) w_k of own and shared models."""
    own = OwnModel(local.build_optimiser(), "own")
    variant = Variant(
        begin=partial(_begin, own),
        watch=partial(_step, own, adaptive),
        part=partial(_part, own),
        collect={"params": Collect.MEAN_BY_CLIENTS, "buffers": Collect.MEAN_BY_CLIENTS},
        keeps=frozenset({"personal", "own", "mixture"}),
        brings=partial(_bring, alpha),
    )
    return local_training(local, variant)


def _bring(alpha: float, model: Model, state: Groups, world: World) -> Groups:
    mixture = {"alpha": world.like.new_tensor(alpha)}
    own = {"own": shared_tensors(state), "mixture": mixture}
    return {**bring_personal(model, state, world), **own}


def _begin(own: OwnModel, model: Model, sent: Groups, memo: Groups) -> Groups:
    mixture = {**memo["mixture"], "first": torch.ones_like(memo["mixture"]["alpha"])}
    return {**own.begin(model, sent, memo), "mixture": mixture}


def _mixed(carry: Groups) -> dict[str, torch.Tensor]:
    alpha = carry["mixture"]["alpha"]
    return combine(lambda v, w: alpha * v + (1 - alpha) * w, carry["own_params"], carry["params"])


def _step(
    own: OwnModel,
    adaptive: bool,
    model: Model,
    sent: Groups,
    carry: Groups,
    output: Output,
    batch: Batch,
) -> Groups:
    """Return the own model and the mixture after a step; carry["params"] is w_k before it."""
    lr, mixture = sent["rates"]["lr"], carry["mixture"]
    gradient, output = slope_at(model, _mixed(carry), carry["own_buffers"], batch)
    if adaptive:
        parts = combine(
            lambda g, v, w: (g * (v - w)).sum(), gradient, carry["own_params"], carry["params"]
        )
        moved = (mixture["alpha"] - lr * sum(parts.values())).clamp(0, 1)
        alpha = torch.where(mixture["first"] > 0, moved, mixture["alpha"])
        mixture = {"alpha": alpha, "first": torch.zeros_like(alpha)}
    scaled = combine(lambda g: mixture["alpha"] * g, gradient)
    return {**own.moved(carry, scaled, output.buffers, lr), "mixture": mixture}


def _part(
    own: OwnModel, model: Model, sent: Groups, carry: Groups, memo: Groups
) -> tuple[Groups, Groups]:
    mixture = {"mixture": {"alpha": carry["mixture"]["alpha"]}}
    personal: Tensors = {**_mixed(carry), **carry["own_buffers"]}
    return {}, {"personal": personal, **mixture, **own.kept(carry)}
