"""DKD, the distillation module of FedDKD: Li, Chen, Lu, "FedDKD: federated learning with decentralized knowledge distillation",
Applied Intelligence 53 (2023), arXiv:2205.00706; Algorithm 1 lines 7-11, Algorithm 2, and for batch norm Algorithms 4 and 5.

    J times:  w <- w - gamma 1/m sum_k g_k,   g_k = grad_w 1/B sum_x CE(softmax f(w_k; x), f(w; x)),  x from client k's own data

The teacher w_k is the client's own model as local training left it; it is never sent. Labels are not used. Put it after any
method that trains locally: fedavg() | dkd() is FedDKD, fedmax() | dkd() FedDKD_MAX, fedbn() | dkd() FedDKD_BN (private tensors
of a client then take their places in the student and are not updated).
"""

from typing import Literal

from torch import Tensor

from feddkd.data.batches import Reads
from feddkd.method import Batch, Collect, Gradient, Method, Phase, Rate, Repeat, own_model
from feddkd.methods.registry import METHODS
from feddkd.models import Mode, Model
from feddkd.objectives import distillation
from feddkd.params import Groups, Tensors, add, only
from feddkd.spelling import Count, Positive, Whole


@METHODS.register
def dkd(
    *,
    steps: Count = 10,
    batch_size: Count = 64,
    lr: Positive = 0.2,
    lr_decay: Positive = 1.0,
    lr_step_decay: Positive = 1.0,
    warmup: Whole = 0,
    student: Literal["eval", "batch", "train"] = "eval",
    teacher: Literal["eval", "batch"] = "eval",
) -> Method:
    """Clients teach the average by their own models: J times w <- w - gamma 1/m sum_k grad CE(softmax f(w_k), f(w))."""
    phase = Phase(
        name="distil",
        client=_client(student, teacher),
        server=_descend,
        reads=Reads(batch_size, steps=1),
        collect={"gradient": Collect.MEAN_BY_CLIENTS},
        rates={"lr": Rate(lr, lr_decay, lr_step_decay)},
        repeat=Repeat(steps, warmup),
        needs=frozenset({"model"}),
    )
    return Method((phase,))


def _client(student: Mode, teacher: Mode) -> Gradient:
    def targets(model: Model, memo: Groups, batch: Batch) -> Tensor:
        w_k = memo["model"]
        return model(only(w_k, model.param_names), only(w_k, model.buffer_names), batch.x, mode=teacher).logits

    def loss(model: Model, w: Tensors, sent: Groups, memo: Groups, batch: Batch, taught: Tensor) -> Tensor:
        params, buffers = own_model(model, {**sent, "params": w}, memo)
        return distillation(taught, model(params, buffers, batch.x, mode=student, key=batch.key).logits, batch)

    return Gradient(targets, loss)


def _descend(state: Groups, collected: Groups, rates: Tensors) -> Groups:
    return {**state, "params": add(state["params"], collected["gradient"], -rates["lr"])}
