"""FedGKD: Yao, Pan, Dai, Wan, Ding, Jin, Xu, Sun, "Local-global knowledge distillation in
heterogeneous federated learning with non-IID data", arXiv:2107.00051; IEEE Transactions on
Computers 2024 as "FedGKD".

    local loss = CE + c T^2 KL( softmax(z_M / T) || softmax(z / T) )
    z_M = logits of the mean of the last M global models

The global models are those with which rounds begin, the present one included, parameters and
buffers. So they include the changes of a later phase such as DKD. The teacher is in evaluation
mode. In the first round there is no distillation, as in the published code, whose c is the paper's
gamma/2. Clients are averaged by examples; that code gives them equal weights. The teacher is sent
in addition to the global model, except for M = 1, where it is the global model. FedGKD-VOTE is not
included: in the published code it has no gradient.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from feddkd.method import Batch, Method, Phase, World, own_model
from feddkd.methods.aggregation import Gathering
from feddkd.methods.local import Local, Variant, hold_private, local_training
from feddkd.methods.losses import TeachingLoss, task_divergence
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model, Output
from feddkd.spec.schedules import Rate
from feddkd.spec.types import Count, NonNegative, Positive
from feddkd.tensors import Groups, Tensors, combine, only, weighted_mean


@METHODS.register
def fedgkd(
    local: Local,
    gathering: Gathering,
    *,
    c: NonNegative = 0.1,
    buffer: Count = 5,
    temperature: Positive = 1.0,
) -> Method:
    """Clients taught by the mean of past global models: loss = CE + c T^2 KL(z_M/T || z/T)."""
    several = buffer > 1
    divergence, requires = task_divergence(temperature)
    variant = Variant(
        terms=(partial(_term, divergence),),
        begin=hold_private,
        sends=("teacher",) if several else (),
        rates={"c": Rate(c, after=1)},
        requires=requires,
    )
    train = local_training(local, variant, gathering)
    remember = Phase(
        name="remember", client=None, server=partial(_remember, buffer), opens=_no_past
    )
    return replace(train, phases=(remember, *train.phases)) if several else train


def _term(
    divergence: TeachingLoss,
    model: Model,
    w: Tensors,
    sent: Groups,
    carry: Groups,
    output: Output,
    batch: Batch,
) -> Tensor:
    if "teacher" in sent:
        teacher = sent["teacher"]
        sent = {
            **sent,
            "params": only(teacher, model.param_names),
            "buffers": only(teacher, model.buffer_names),
        }
    taught = model(*own_model(model, sent, carry), batch.x, mode="eval", key=batch.key).logits
    return sent["rates"]["c"] * divergence(model, taught, output.logits, batch)


def _no_past(model: Model, state: Groups, world: World) -> Groups:
    """Return an empty list of past models, and the initial model as the teacher."""
    whole = {**state["params"], **state["buffers"]}
    return {
        "past": combine(lambda tensor: tensor.new_empty((0, *tensor.shape)), whole),
        "teacher": whole,
    }


def _remember(
    buffer: int, model: Model, state: Groups, collected: Groups, rates: Tensors
) -> Groups:
    """Add the present model to the past ones, the newest first; their mean is the teacher."""
    now = {**state["params"], **state["buffers"]}
    past = combine(lambda new, old: torch.cat([new[None], old[: buffer - 1]]), now, state["past"])
    count = len(next(iter(past.values())))
    return {**state, "past": past, "teacher": weighted_mean(past, [1] * count)}
