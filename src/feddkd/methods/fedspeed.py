"""FedSpeed: Sun, Shen, Huang, Ding, Tao, "FedSpeed: larger local interval, less communication
round, and higher generalization accuracy", ICLR 2023, arXiv:2302.10429.

    client: w <- w - lr (g - h_k + alpha (w - w_t)),   h_k <- h_k - alpha (w_k - w_t)
            g = grad f_k(w + rho grad f_k(w) / |grad f_k(w)|)
    server: h <- h - alpha/N sum_k (w_k - w_t),   w_{t+1} = mean_k w_k - h/alpha

alpha is the paper's 1/lambda. This is the form of the authors' code: FedDyn with sharpness-aware
gradients, where correction and proximal term are taken at w and have no part in the perturbation.
The paper also merges g with the gradient at w; the code takes g alone, and so does this. With all
clients active the server's step is the mean of w_k - h_k/alpha. The published code clips gradients
at norm 10.
"""

from dataclasses import replace
from functools import partial

from feddkd.method import Method
from feddkd.methods.aggregation import Gathering
from feddkd.methods.feddyn import dual_variables
from feddkd.methods.local import Local, local_training
from feddkd.methods.registry import METHODS
from feddkd.methods.sharpness import sharpness_aware
from feddkd.spec.types import NonNegative, Positive
from feddkd.tensors import Groups, Tensors, combine


@METHODS.register
def fedspeed(
    local: Local, gathering: Gathering, *, alpha: Positive = 0.1, rho: NonNegative = 0.1
) -> Method:
    """FedDyn with sharpness-aware steps: w <- w - lr (g(w + e) - h_k + alpha (w - w_t))."""
    variant = replace(
        dual_variables(alpha), take=sharpness_aware(rho), bend=partial(prox_corrected, alpha)
    )
    return local_training(local, variant, gathering)


def prox_corrected(alpha: float, gradient: Tensors, sent: Groups, carry: Groups) -> Tensors:
    """Return g - h_k + alpha (w - w_t) for shared parameters, g for private ones."""
    corrected = combine(
        lambda h_k, g, w, w_t: g - h_k + alpha * (w - w_t),
        carry["slope"],
        gradient,
        carry["params"],
        sent["params"],
    )
    return {**gradient, **corrected}
