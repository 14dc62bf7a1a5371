"""FedMAX: Chen, Bhardwaj, Marculescu, "FedMAX: mitigating activation divergence for accurate and
communication-efficient federated learning", ECML PKDD 2020, arXiv:2004.03657.

    local loss = CE + beta KL(U || softmax(a)),   a = the input of the last layer, U uniform

The published code also averages the divergence over the D activations (`reduction="mean"`, which
divides beta by D) and takes it from U to the activations. FedDKD's paper writes KL(a || U) without
1/D: `reduction="batchmean", reverse=True`.
"""

from typing import Literal

from feddkd.method import Method
from feddkd.methods.aggregation import Gathering
from feddkd.methods.local import Local, Variant, local_training
from feddkd.methods.losses import FEATURES, activation_entropy
from feddkd.methods.registry import METHODS
from feddkd.spec.types import NonNegative


@METHODS.register
def fedmax(
    local: Local,
    gathering: Gathering,
    *,
    beta: NonNegative = 10.0,
    reduction: Literal["mean", "batchmean"] = "mean",
    reverse: bool = False,
) -> Method:
    """FedAvg with activations pulled to maximum entropy: loss = CE + beta KL(U || softmax(a))."""
    term = activation_entropy(beta, reduction, reverse)
    return local_training(local, Variant(terms=(term,), requires=FEATURES), gathering)
