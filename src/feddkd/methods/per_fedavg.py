"""Per-FedAvg: Fallah, Mokhtari, Ozdaglar, "Personalized federated learning with theoretical
guarantees: a model-agnostic meta-learning approach", NeurIPS 2020, arXiv:2002.07948.

    u = w - alpha grad f(w; D)
    fo:  w <- w - lr grad f(u; D')
    hf:  w <- w - lr (g - alpha h),   g = grad f(u; D')
         h = (grad f(w + delta g; D'') - grad f(w - delta g; D'')) / (2 delta)
    server: w_{t+1} = mean_k w_k;   client k is judged after `tune_steps` steps of rate alpha

Clients train a model that is good after one more step on their own examples. D, D' and D'' are
consecutive mini-batches, so one step of w takes two of them ("fo") or three ("hf"); those that are
left over at the end are not used. A client needs that many in a round, or it does not move. "hf"
takes the product with the Hessian as a difference of gradients; "fo" leaves it out. The mean has
equal weights of the clients. Before each evaluation every client makes its steps from the shared
model (see fine_tune); `evaluation="global"` judges the shared model without them.
"""

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from feddkd.method import Collect, Method, own_model
from feddkd.methods.fine_tuning import tuning
from feddkd.methods.local import Local, Slope, Variant, counted, local_training
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model, Output
from feddkd.spec.types import Count, Positive
from feddkd.tensors import Groups, Tensors, add, combine, zeros

PERIOD = {"fo": 2, "hf": 3}  # mini-batches for one step of w


@METHODS.register
def per_fedavg(
    local: Local,
    *,
    alpha: Positive = 0.01,
    form: Literal["fo", "hf"] = "fo",
    delta: Positive = 1e-3,
    tune_steps: Count = 1,
) -> Method:
    """FedAvg of a model to fine-tune: w <- w - lr (I - alpha H) grad f(w - alpha grad f(w))."""
    begin, watch = counted(_begin)
    variant = Variant(
        begin=begin,
        take=partial(_take_hf, alpha, delta) if form == "hf" else partial(_take_fo, alpha),
        holds=partial(_holds, PERIOD[form]),
        watch=watch,
        collect={"params": Collect.MEAN_BY_CLIENTS, "buffers": Collect.MEAN_BY_CLIENTS},
    )
    (train,) = local_training(local, variant).phases
    steps = Local(batch_size=local.batch_size, steps=tune_steps, lr=alpha)
    return Method((train, tuning(steps)))


def _begin(model: Model, sent: Groups, memo: Groups) -> Groups:
    """Return u and g before their first values."""
    empty = zeros(own_model(model, sent, memo)[0])
    return {"u": empty, "g": empty}


def _holds(period: int, model: Model, carry: Groups) -> dict[str, Tensor]:
    """Return True for all tensors, except in the last mini-batch of a step of w."""
    waits = carry["progress"]["step"] % period != period - 1
    return dict.fromkeys(carry["params"], waits)


def _chosen(when: Tensor, a: Tensors, b: Tensors) -> dict[str, Tensor]:
    return combine(lambda a, b: torch.where(when, a, b), a, b)


def _take_fo(
    alpha: float, slope: Slope, sent: Groups, carry: Groups
) -> tuple[Tensors, Output, Groups]:
    """Return grad f(w) on D, or grad f(u) on D'."""
    first = carry["progress"]["step"] % 2 == 0
    w = carry["params"]
    gradient, output = slope(_chosen(first, w, carry["u"]))
    u = _chosen(first, add(w, gradient, -alpha), carry["u"])
    return gradient, output, {"u": u}


def _take_hf(
    alpha: float, delta: float, slope: Slope, sent: Groups, carry: Groups
) -> tuple[Tensors, Output, Groups]:
    """Return grad f(w) on D, grad f(u) on D', or the step's whole direction on D''."""
    place, w, g = carry["progress"]["step"] % 3, carry["params"], carry["g"]
    above = _chosen(place == 1, carry["u"], add(w, g, delta))
    gradient, output = slope(_chosen(place == 0, w, above))
    below, _ = slope(add(w, g, -delta))
    direction = combine(
        lambda g, up, down: g - alpha * (up - down) / (2 * delta), g, gradient, below
    )
    u = _chosen(place == 0, add(w, gradient, -alpha), carry["u"])
    return direction, output, {"u": u, "g": _chosen(place == 1, gradient, g)}
