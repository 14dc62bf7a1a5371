"""FedLESAM: Fan, Hu, Yao, Niu, Zhang, Sugiyama, Wang, "Locally estimated global perturbations are
better than local perturbations for federated sharpness-aware minimization", ICML 2024,
arXiv:2405.18890.

    w <- w - lr grad f_k(w + e_k),   e_k = rho (w_k^old - w_t) / |w_k^old - w_t|
    w_k^old = the global model that client k received when it was active before

The move of the global model since then shows the direction in which the global loss falls, so its
reverse stands for the ascent of the global loss. A local step has one gradient, as in FedAvg. A
client that was never active before takes the initial global model as w_k^old; in round 1 there is
no perturbation. Private parameters are not perturbed.
"""

from functools import partial

from feddkd.method import Method
from feddkd.methods.aggregation import Gathering
from feddkd.methods.local import Local, Slope, Variant, local_training
from feddkd.methods.registry import METHODS
from feddkd.methods.sharpness import scaled
from feddkd.models.functional import Model, Output
from feddkd.spec.types import NonNegative
from feddkd.tensors import Groups, Tensors, add


@METHODS.register
def fedlesam(local: Local, gathering: Gathering, *, rho: NonNegative = 0.1) -> Method:
    """Gradients at w + e, along the global model's move: e = rho (w_old - w_t)/|w_old - w_t|."""
    variant = Variant(
        begin=partial(_begin, rho),
        take=_take,
        part=lambda model, sent, carry, memo: ({}, {"received": sent["params"]}),
        keeps=frozenset({"received"}),
        brings=lambda model, state, world: {"received": state["params"]},
    )
    return local_training(local, variant, gathering)


def _begin(rho: float, model: Model, sent: Groups, memo: Groups) -> Groups:
    """Return the perturbation of all local steps of the round."""
    return {"ascent": scaled(add(memo["received"], sent["params"], -1), rho)}


def _take(slope: Slope, sent: Groups, carry: Groups) -> tuple[Tensors, Output, Groups]:
    """Return gradient and output at w + e_k."""
    w = carry["params"]
    return *slope({**w, **add(carry["ascent"], w)}), {}
