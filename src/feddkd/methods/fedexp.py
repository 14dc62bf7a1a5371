"""FedExP: Jhunjhunwala, Wang, Joshi, "FedExP: speeding up federated averaging via extrapolation",
ICLR 2023, arXiv:2301.09604.

    w_{t+1} = w_t + eta (wbar - w_t),   p_k = n_k / sum_i n_i
    eta = max(1, sum_k p_k |w_k - w_t|^2 / (2 (|wbar - w_t|^2 + epsilon)))

The more the clients' moves differ, the further the server goes along their mean. Clients upload the
square of their move's length with their model. The paper's formula has equal weights 1/m; its code
has weights by examples. Only shared parameters are extrapolated; buffers are averaged. The paper
also evaluates the mean of the last two models, because the models of even and odd rounds can
differ; here the model of the last round is evaluated.
"""

from functools import partial

from feddkd.method import Collect, Method
from feddkd.methods.local import Local, Variant, local_training, take_average
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model
from feddkd.spec.types import NonNegative
from feddkd.tensors import Groups, Tensors, add, norm, only


@METHODS.register
def fedexp(local: Local, *, epsilon: NonNegative = 1e-3) -> Method:
    """FedAvg with a longer step where clients differ: w = w_t + eta (wbar - w_t), eta >= 1."""
    variant = Variant(
        part=_measure,
        server=partial(_extrapolate, epsilon),
        collect={"move": Collect.MEAN_BY_EXAMPLES},
    )
    return local_training(local, variant)


def _measure(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
    """Return |w_k - w_t|^2 as an upload."""
    move = add(only(carry["params"], sent["params"]), sent["params"], -1)
    return {"move": {"square": norm(move).square()}}, {}


def _extrapolate(
    epsilon: float, model: Model, state: Groups, collected: Groups, rates: Tensors
) -> Groups:
    """Move along the mean of the clients' moves by eta."""
    mean = add(collected["params"], state["params"], -1)
    eta = collected["move"]["square"] / (2 * (norm(mean).square() + epsilon))
    params = add(state["params"], mean, eta.clamp(min=1))
    return {**take_average(model, state, collected, rates), "params": params}
