"""Fed-RoD: Chen, Chao, "On bridging generic and personalized federated learning for image
classification", ICLR 2022, arXiv:2107.00778.

    w:    FedAvg with the balanced softmax,  loss = CE(f(w; x) + log n_k, y)
    h_k <- h_k - lr grad_h CE(f(w; x) + h_k(z), y),   h_k = client k's own head
    client k is judged by f(w_k; x) + h_k(z)

n_k holds client k's numbers of examples by class, so the shared model learns as from balanced
classes. z is the input of the last linear layer; the own head is a layer of the same shape that
adds to the logits, and neither z nor f gets a gradient from its loss. Both are trained on the same
mini-batches. The paper leaves the start of h_k open: here it is zero, so that a client begins as
the shared model. h_k stays with its client, and so does w_k, the client's model at the end of its
local training, by which it is judged. The paper's other balanced losses and its heads from a
hypernetwork are not included. `evaluation="global"` judges the shared model.
"""

from functools import partial

from torch import Tensor

from feddkd.gradient import grad
from feddkd.method import Batch, Method, World
from feddkd.methods.aggregation import Gathering
from feddkd.methods.balance import begin_with_labels, plus_log_counts
from feddkd.methods.local import Local, Variant, local_training
from feddkd.methods.losses import CLASSES, FEATURES, task_loss
from feddkd.methods.personal import OwnModel, bring_personal
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model, Output
from feddkd.tensors import Groups, Tensors, add, only, zeros


@METHODS.register
def fedrod(local: Local, gathering: Gathering) -> Method:
    """FedAvg with balanced loss CE(f + log n_k, y), and own heads h_k that add to its logits."""
    head = OwnModel(local.build_optimiser(), "residual")
    variant = Variant(
        calibrate=plus_log_counts,
        begin=lambda model, sent, memo: {
            **begin_with_labels(model, sent, memo),
            **head.begin(model, sent, memo),
        },
        watch=partial(_step, head),
        part=partial(_part, head),
        keeps=frozenset({"personal", "residual"}),
        brings=_bring,
        facts=frozenset({"labels"}),
        requires=CLASSES | FEATURES,
    )
    return local_training(local, variant, gathering)


def _bring(model: Model, state: Groups, world: World) -> Groups:
    head = zeros(only(state["params"], model.head_names))
    return {**bring_personal(model, state, world), "residual": head}


def _step(
    head: OwnModel, model: Model, sent: Groups, carry: Groups, output: Output, batch: Batch
) -> Groups:
    """Return the own head after a step; `output` is that of the client's model before its step."""

    def loss(h: Tensors) -> Tensor:
        return task_loss(model, output.logits + model.apply_head(h, output.features), batch)

    return head.moved(carry, grad(loss)(carry["own_params"]), {}, sent["rates"]["lr"])


def _part(
    head: OwnModel, model: Model, sent: Groups, carry: Groups, memo: Groups
) -> tuple[Groups, Groups]:
    """Return the sum of both heads on the client's body as the personal model."""
    w_k = carry["params"]
    both = add(carry["own_params"], w_k)
    return {}, {"personal": {**w_k, **both, **carry["buffers"]}, **head.kept(carry)}
