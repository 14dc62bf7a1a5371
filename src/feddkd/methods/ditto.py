"""Ditto: Li, Hu, Beirami, Smith, "Ditto: fair and robust federated learning through
personalization", ICML 2021, arXiv:2012.04221.

    w:    FedAvg
    v_k <- v_k - lr ( grad f_k(v_k) + lam (v_k - w_t) ),   client k is judged by v_k

Each client has a personal model v_k beside the shared one, and makes a step of it on each
mini-batch of local training, as in the authors' code; w_t is the model that was sent. The personal
model stays with its client and takes no part in the average. Its optimiser is that of local
training and restarts in every round. The paper tunes lam for each data set; 1 is the middle of
the candidates 0.1, 1 and 2 in its code. `evaluation="global"` judges the shared model.
"""

from functools import partial

from feddkd.method import Batch, Method
from feddkd.methods.aggregation import Gathering
from feddkd.methods.local import Local, Variant, local_training
from feddkd.methods.personal import OwnModel, bring_personal, slope_at
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model, Output
from feddkd.spec.types import NonNegative
from feddkd.tensors import Groups, combine


@METHODS.register
def ditto(local: Local, gathering: Gathering, *, lam: NonNegative = 1.0) -> Method:
    """FedAvg, and personal models near it: v_k <- v_k - lr (grad f_k(v_k) + lam (v_k - w_t))."""
    own = OwnModel(local.build_optimiser())
    variant = Variant(
        begin=own.begin,
        watch=partial(_step, own, lam),
        part=lambda model, sent, carry, memo: ({}, own.kept(carry)),
        keeps=frozenset({"personal"}),
        brings=bring_personal,
    )
    return local_training(local, variant, gathering)


def _step(
    own: OwnModel,
    lam: float,
    model: Model,
    sent: Groups,
    carry: Groups,
    output: Output,
    batch: Batch,
) -> Groups:
    """Return the personal model after a step towards its own optimum and the shared model."""
    v = carry["own_params"]
    gradient, output = slope_at(model, v, carry["own_buffers"], batch)
    pulled = combine(lambda g, v, w: g + lam * (v - w), gradient, v, sent["params"])
    return own.moved(carry, pulled, output.buffers, sent["rates"]["lr"])
