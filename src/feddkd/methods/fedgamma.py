"""FedGamma: Dai, Yang, Sun, Shen, Tian, Wang, Zhang, "FedGAMMA: federated learning with global
sharpness-aware minimization", IEEE Transactions on Neural Networks and Learning Systems 2023,
doi:10.1109/TNNLS.2023.3304453.

    client: w <- w - lr (g - c_k + c),   g = grad f_k(w + rho grad f_k(w) / |grad f_k(w)|)
    c_k, c and the average as in SCAFFOLD

It is SCAFFOLD with sharpness-aware gradients: the perturbation is that of the client's own loss,
and the control variates correct the gradient after it, as in the code of FL-Simulator by the
authors' group, which is our source.
"""

from dataclasses import replace

from feddkd.method import Method
from feddkd.methods.local import Local, local_training
from feddkd.methods.registry import METHODS
from feddkd.methods.scaffold import control_variates
from feddkd.methods.sharpness import sharpness_aware
from feddkd.spec.types import NonNegative


@METHODS.register
def fedgamma(local: Local, *, rho: NonNegative = 0.1) -> Method:
    """SCAFFOLD with sharpness-aware steps: w <- w - lr (grad f_k(w + rho g/|g|) - c_k + c)."""
    variant = control_variates(local, "fedgamma")
    return local_training(local, replace(variant, take=sharpness_aware(rho)))
