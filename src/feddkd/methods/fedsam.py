"""FedSAM, MoFedSAM: Qu, Li, Duan, Liu, Tang, Lu, "Generalized federated learning via sharpness
aware minimization", ICML 2022, arXiv:2206.02618; FedSAM also: Caldarola, Caputo, Ciccone,
"Improving generalization in federated learning by seeking flat minima", ECCV 2022,
arXiv:2203.11834.

    fedsam:    w <- w - lr g,   g = grad f_k(w + rho grad f_k(w) / |grad f_k(w)|)
    mofedsam:  w <- w - lr (alpha g + (1 - alpha) D_t),   D_t as in FedCM

Every local step computes two gradients on its mini-batch. Weight decay belongs to the optimiser: it
is added at w and has no part in the perturbation. Optimisers with momentum or Adam are possible
with fedsam; mofedsam needs the length of the steps and takes SGD alone.
"""

from dataclasses import replace

from feddkd.method import Method
from feddkd.methods.aggregation import Gathering
from feddkd.methods.fedcm import client_momentum
from feddkd.methods.local import Local, Variant, local_training
from feddkd.methods.registry import METHODS
from feddkd.methods.sharpness import sharpness_aware
from feddkd.spec.types import NonNegative, Share


@METHODS.register
def fedsam(local: Local, gathering: Gathering, *, rho: NonNegative = 0.05) -> Method:
    """FedAvg with sharpness-aware local steps: g = grad f_k(w + rho g_0 / |g_0|), g_0 at w."""
    return local_training(local, Variant(take=sharpness_aware(rho)), gathering)


@METHODS.register
def mofedsam(local: Local, *, rho: NonNegative = 0.05, alpha: Share = 0.1) -> Method:
    """FedSAM with momentum in local steps: w <- w - lr (alpha g + (1 - alpha) D_t)."""
    variant = client_momentum(local, alpha, "mofedsam")
    return local_training(local, replace(variant, take=sharpness_aware(rho)))
