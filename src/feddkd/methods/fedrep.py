"""FedRep: Collins, Hassani, Mokhtari, Shakkottai, "Exploiting shared representations for
personalized federated learning", ICML 2021, arXiv:2102.07078.

    first `head_epochs` epochs:  h_k <- h_k - lr grad_h f_k(b_t, h_k)
    then `epochs` epochs:        b_k <- b_k - lr grad_b f_k(b_k, h_k)
    server:                      b_{t+1} = sum_k n_k / (sum_i n_i) b_k

Each client keeps its own head h; the body b is shared. While one of them is trained, the other is
fixed, and so is the optimiser's state of it. `names` lists the tensors of the head as patterns; by
default it is the last linear layer. Private tensors of another kind, as of local_bn(), are trained
with the head. `epochs` is the number of epochs for the body; the option `steps` does not go with
the two stages.
"""

from dataclasses import replace
from functools import partial

from torch import Tensor

from feddkd.errors import InputError
from feddkd.method import Method
from feddkd.methods.aggregation import Gathering
from feddkd.methods.local import Local, Variant, counted, hold_private, local_training
from feddkd.methods.private import keeping
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model
from feddkd.spec.types import Count, Names
from feddkd.tensors import Groups


@METHODS.register
def fedrep(
    local: Local, gathering: Gathering, *, head_epochs: Count = 10, names: Names | None = None
) -> Method:
    """Own heads, a shared body, trained one after the other: h_k with b_t fixed, b with h_k."""
    if local.steps is not None:
        raise InputError(
            "fedrep: steps does not go with head_epochs: give epochs for the body in its place"
        )
    begin, watch = counted(partial(_begin, head_epochs))
    variant = Variant(begin=begin, watch=watch, holds=_holds, facts=frozenset({"batches"}))
    both = replace(local, epochs=head_epochs + local.epochs)
    return keeping(local_training(both, variant, gathering), names, "head")


def _begin(head_epochs: int, model: Model, sent: Groups, memo: Groups) -> Groups:
    """Return the head, and the number of steps in which it is trained."""
    head_steps = head_epochs * memo["facts"]["batches"]
    return {**hold_private(model, sent, memo), "stage": {"head_steps": head_steps}}


def _holds(model: Model, carry: Groups) -> dict[str, Tensor]:
    """Return True for the body in the steps of the head, and for the head in all others."""
    of_head = carry["progress"]["step"] < carry["stage"]["head_steps"]
    head = carry["private"]
    return {name: ~of_head if name in head else of_head for name in carry["params"]}
