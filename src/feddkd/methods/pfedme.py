"""pFedMe: T. Dinh, Tran, Nguyen, "Personalized federated learning with Moreau envelopes", NeurIPS
2020, arXiv:2006.08848.

    each mini-batch:  `inner_steps` times  theta <- theta - inner_lr (grad f(theta) + lam (theta-w))
                      w <- w - lr lam (w - theta)
    server:           w_{t+1} = (1 - beta) w_t + beta mean_k w_k;   client k is judged by theta

theta approximates the minimum of f_k(theta) + lam/2 |theta - w|^2 on the mini-batch. The paper
leaves open where it starts; as in the authors' code it starts at w_t in every round and goes on
from mini-batch to mini-batch. (That code adds weight decay to the steps of theta; here there is
none.) The step of w is one of the optimiser of local training, whose gradient is lam (w - theta):
lr lam should stay below 1. The mean has equal weights of the clients, as in the paper. Running
statistics of batch norm are those of theta. `evaluation="global"` judges the shared model.
"""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from feddkd.method import Collect, Method, own_model
from feddkd.methods.local import Local, Slope, Variant, local_training, take_average
from feddkd.methods.personal import bring_personal
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model, Output
from feddkd.spec.types import Count, NonNegative, Positive
from feddkd.tensors import Groups, Tensors, add, combine


@dataclass(frozen=True, kw_only=True)
class SlowLocal(Local):
    """Options of local training with the paper's learning rate."""

    lr: Positive = 0.005


@METHODS.register
def pfedme(
    local: SlowLocal,
    *,
    lam: NonNegative = 15.0,
    inner_steps: Count = 5,
    inner_lr: Positive = 0.09,
    beta: Positive = 1.0,
) -> Method:
    """Centre of personal models theta, each near its own optimum: w <- w - lr lam (w - theta)."""
    variant = Variant(
        begin=lambda model, sent, memo: {"theta": own_model(model, sent, memo)[0]},
        take=partial(_take, lam, inner_steps, inner_lr),
        part=_keep,
        server=partial(_server, beta),
        collect={"params": Collect.MEAN_BY_CLIENTS, "buffers": Collect.MEAN_BY_CLIENTS},
        keeps=frozenset({"personal"}),
        brings=bring_personal,
    )
    return local_training(local, variant)


def _take(
    lam: float, steps: int, lr: float, slope: Slope, sent: Groups, carry: Groups
) -> tuple[Tensors, Output, Groups]:
    """Return lam (w - theta) after the steps of theta, and the output before the last of them."""
    w, theta = carry["params"], carry["theta"]

    def move(theta: Tensor, gradient: Tensor, w: Tensor) -> Tensor:
        return theta - lr * (gradient + lam * (theta - w))

    for _ in range(steps):
        gradient, output = slope(theta)
        theta = combine(move, theta, gradient, w)
    return combine(lambda w, theta: lam * (w - theta), w, theta), output, {"theta": theta}


def _keep(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
    return {}, {"personal": {**carry["theta"], **carry["buffers"]}}


def _server(beta: float, model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
    """Move the shared parameters to the mean by beta; buffers are those of the mean."""
    change = add(collected["params"], state["params"], -1)
    params = add(state["params"], change, beta)
    return {**take_average(model, state, collected, rates), "params": params}
