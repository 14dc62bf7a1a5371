"""FedALA: Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedALA: adaptive local aggregation for
personalized federated learning", AAAI 2023, arXiv:2212.01197.

    first `ala_epochs` epochs:  W <- clip(W - ala_lr grad f_k(u) * (w_t - v_k), 0, 1)
                                u = v_k + (w_t - v_k) * W in the head, u = w_t in the body
    then `epochs` epochs:       v_k <- local training from u
    server:                     w_{t+1} = sum_k n_k / (sum_i n_i) v_k;   client k is judged by v_k

Before it trains, a client learns how much of each number of the shared head it takes in place of
its own from the last time (products * are by element). W starts at one and stays with its client
from round to round, as does v_k. `names` lists the tensors that are mixed ("higher layers") as
patterns; by default it is the last linear layer. The paper learns W on a random 80 percent of the
examples, and the first time until the loss no longer changes; here each round has `ala_epochs`
passes over all of them. Running statistics of batch norm change in these passes, too, and are sent
and averaged. The option `steps` does not go with the two stages. `evaluation="global"` judges the
shared model.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from feddkd.errors import InputError
from feddkd.method import Batch, Fold, Method, World
from feddkd.methods.aggregation import Gathering
from feddkd.methods.local import Local, Slope, Variant, counted, local_training
from feddkd.methods.personal import bring_personal
from feddkd.methods.private import head_of
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model, Output
from feddkd.spec.types import Count, Names, Positive
from feddkd.tensors import Groups, Tensors, combine, only


@METHODS.register
def fedala(
    local: Local,
    gathering: Gathering,
    *,
    ala_epochs: Count = 1,
    ala_lr: Positive = 1.0,
    names: Names | None = None,
) -> Method:
    """Own models v_k; a client starts from v_k + (w_t - v_k) * W in the head, W learned before."""
    if local.steps is not None:
        raise InputError("fedala: steps does not go with ala_epochs: give epochs in its place")
    begin, watch = counted(partial(_begin, ala_epochs))
    variant = Variant(
        begin=begin,
        take=partial(_learn, ala_lr),
        holds=lambda model, carry: dict.fromkeys(carry["params"], _aggregates(carry)),
        watch=watch,
        part=_keep,
        keeps=frozenset({"personal", "ala"}),
        brings=partial(_bring, names),
        facts=frozenset({"batches"}),
    )
    both = replace(local, epochs=ala_epochs + local.epochs)
    (phase,) = local_training(both, variant, gathering).phases
    assert isinstance(phase.client, Fold)
    return Method((replace(phase, client=_mixing(phase.client)),))


def _bring(names: str | None, model: Model, state: Groups, world: World) -> Groups:
    head = only(state["params"], head_of(model, names))
    return {**bring_personal(model, state, world), "ala": combine(torch.ones_like, head)}


def _begin(epochs: int, model: Model, sent: Groups, memo: Groups) -> Groups:
    """Return W, the head from the last time, and the number of steps in which W is learned."""
    last = only(memo["personal"], memo["ala"])
    steps = {"ala_steps": epochs * memo["facts"]["batches"]}
    return {"ala": memo["ala"], "last": last, "stage": steps}


def _aggregates(carry: Groups) -> Tensor:
    return carry["progress"]["step"] < carry["stage"]["ala_steps"]


def _learn(lr: float, slope: Slope, sent: Groups, carry: Groups) -> tuple[Tensors, Output, Groups]:
    """Return the gradient at the weights of the carry, and W after a step along it."""
    gradient, output = slope(carry["params"])
    learns = _aggregates(carry)

    def step(weight: Tensor, g: Tensor, shared: Tensor, last: Tensor) -> Tensor:
        moved = (weight - lr * g * (shared - last)).clamp(0, 1)
        return torch.where(learns, moved, weight)

    learned = combine(step, carry["ala"], gradient, sent["params"], carry["last"])
    return gradient, output, {"ala": learned}


def _mixed(sent: Groups, carry: Groups) -> Tensors:
    """Return u: the mixture in the head, the shared tensors elsewhere."""
    head = combine(
        lambda weight, last, shared: last + (shared - last) * weight,
        carry["ala"],
        carry["last"],
        sent["params"],
    )
    return {**sent["params"], **head}


def _mixing(client: Fold) -> Fold:
    """Return a client whose weights are the mixture as long as it learns W."""

    def start(model: Model, sent: Groups, memo: Groups) -> Groups:
        carry = client.start(model, sent, memo)
        return {**carry, "params": _mixed(sent, carry)}

    def step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        after, learns = client.step(model, sent, carry, batch), _aggregates(carry)
        params = combine(
            lambda mixed, moved: torch.where(learns, mixed, moved),
            _mixed(sent, after),
            after["params"],
        )
        return {**after, "params": params}

    return replace(client, start=start, step=step)


def _keep(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
    return {}, {"personal": {**carry["params"], **carry["buffers"]}, "ala": carry["ala"]}
