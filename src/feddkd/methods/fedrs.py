"""FedRS: Li, Zhan, "FedRS: federated learning with restricted softmax for label distribution
non-IID data", KDD 2021, doi:10.1145/3447548.3467254.

    local loss = CE(a * f(w; x), y),   a_c = 1 if client k has examples of class c, else alpha

The logits of classes that a client does not have are scaled down, so their rows of the last layer
are pushed away less.
"""

from functools import partial

from torch import Tensor

from feddkd.method import Method
from feddkd.methods.aggregation import Gathering
from feddkd.methods.balance import begin_with_labels, by_class
from feddkd.methods.local import Local, Variant, local_training
from feddkd.methods.losses import CLASSES
from feddkd.methods.registry import METHODS
from feddkd.spec.types import Share
from feddkd.tensors import Groups


@METHODS.register
def fedrs(local: Local, gathering: Gathering, *, alpha: Share = 0.5) -> Method:
    """FedAvg with a restricted softmax: logits of classes that a client lacks, times alpha."""
    variant = Variant(
        calibrate=partial(_calibrate, alpha),
        begin=begin_with_labels,
        facts=frozenset({"labels"}),
        requires=CLASSES,
    )
    return local_training(local, variant, gathering)


def _calibrate(alpha: float, logits: Tensor, carry: Groups) -> Tensor:
    missing = (carry["labels"]["count"] == 0).to(logits.dtype)
    return logits * (1 - (1 - alpha) * by_class(logits, missing))
