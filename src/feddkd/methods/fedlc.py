"""FedLC: Zhang, Li, Li, Chen, Chen, Zhang, Wu, "Federated learning with label distribution skew via
logits calibration", ICML 2022, arXiv:2209.00189.

    local loss = CE(f(w; x) - tau n_k^(-1/4), y)

n_k holds client k's numbers of examples by class: a rare class gets a larger margin. The paper's
sum over the other classes in the denominator is taken over all classes, as in a softmax; with the
paper's form the loss has no lower bound. A class of which the client has no example counts as 1e-8
examples, so its logit is 100 tau lower and it is practically left out.
"""

from functools import partial

from torch import Tensor

from feddkd.method import Method
from feddkd.methods.aggregation import Gathering
from feddkd.methods.balance import begin_with_labels, by_class
from feddkd.methods.local import Local, Variant, local_training
from feddkd.methods.losses import CLASSES
from feddkd.methods.registry import METHODS
from feddkd.spec.types import NonNegative
from feddkd.tensors import Groups


@METHODS.register
def fedlc(local: Local, gathering: Gathering, *, tau: NonNegative = 1.0) -> Method:
    """FedAvg with larger margins for rare classes: loss = CE(f - tau n_k^(-1/4), y)."""
    variant = Variant(
        calibrate=partial(_calibrate, tau),
        begin=begin_with_labels,
        facts=frozenset({"labels"}),
        requires=CLASSES,
    )
    return local_training(local, variant, gathering)


def _calibrate(tau: float, logits: Tensor, carry: Groups) -> Tensor:
    counts = carry["labels"]["count"].clamp(min=1e-8)
    return logits - tau * by_class(logits, counts**-0.25)
