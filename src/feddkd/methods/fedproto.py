"""FedProto: Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: federated prototype learning across
heterogeneous clients", AAAI 2022, arXiv:2105.00243.

    local loss = CE + lam 1/B sum_i |z_i - C[y_i]|^2 / d,   z = the input of the last linear layer
    C[c] = sum_k n_k[c] C_k[c] / sum_k n_k[c],   C_k[c] = client k's mean of z on its label c

Every client keeps its own model, and only the means of features by label ("prototypes") travel.
n_k[c] counts client k's examples of label c; the paper's further factor, one over the number of
clients that have the label, is left out, as it would shrink the means. (The authors' code takes
plain means over the clients.) The distance is the mean square, as in their code; a label without a
prototype, as all in the first round, has no term. The prototypes are those of the trained model in
evaluation mode, for which the clients read their examples once more: a second exchange of the
round, which sends nothing down. Clients are judged by their own networks; the paper also classifies
by the nearest prototype.
"""

from functools import partial

import torch
from torch import Tensor, nn

from feddkd.data.batches import Reads
from feddkd.errors import InputError
from feddkd.method import Batch, Collect, Fold, Method, Phase, World
from feddkd.methods.local import Local, Variant, local_training
from feddkd.methods.losses import CLASSES, FEATURES, mean
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model, Output
from feddkd.spec.types import NonNegative
from feddkd.tensors import Groups, Tensors, only

AT_ONCE = 1000  # examples whose features are computed in one step


@METHODS.register
def fedproto(local: Local, *, lam: NonNegative = 1.0) -> Method:
    """Private models, shared mean features: CE + lam |z - C[y]|^2/d, C = mean z by label."""
    variant = Variant(
        terms=(partial(_term, lam),),
        sends=("prototypes",),
        opens=_open,
        private="model",
        requires=CLASSES | FEATURES,
    )
    train = local_training(local, variant)
    return Method((*train.phases, _prototypes()), train.private)


def _open(model: Model, state: Groups, world: World) -> Groups:
    """Return the table of prototypes before the first round: a row of zeros for each label."""
    if model.head is None:
        raise InputError(
            "fedproto compares inputs of the last linear layer, and this network has no linear"
            " layer"
        )
    return {"prototypes": _empty(model, world)}


def _empty(model: Model, world: World) -> Tensors:
    head = model.net.get_submodule(model.head or "")
    assert isinstance(head, nn.Linear)
    zero = world.like.new_zeros(world.classes, head.in_features)
    return {"sum": zero, "count": zero[:, 0]}


def _term(
    lam: float,
    model: Model,
    w: Tensors,
    sent: Groups,
    carry: Groups,
    output: Output,
    batch: Batch,
) -> Tensor:
    total, count = sent["prototypes"]["sum"], sent["prototypes"]["count"]
    known = count > 0
    prototypes = total / torch.where(known, count, 1).unsqueeze(-1)
    known = known.to(total.dtype)[batch.y]
    distances = (output.features - prototypes[batch.y]).square().mean(-1)
    return lam * mean(known * distances, batch)


def _prototypes() -> Phase:
    """Return the phase in which clients upload their sums of features by label."""
    return Phase(
        name="prototypes",
        client=Fold(_start, _step, _finish),
        server=lambda model, state, collected, rates: {**state, **collected},
        reads=Reads(AT_ONCE, random=False),
        collect={"prototypes": Collect.MEAN_BY_CLIENTS},
        sends=(),
        needs=frozenset({"model"}),
        keeps=frozenset({"blank"}),
        brings=lambda model, state, world: {"blank": _empty(model, world)},
    )


def _start(model: Model, sent: Groups, memo: Groups) -> Groups:
    return {"model": memo["model"], "prototypes": memo["blank"]}


def _step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
    """Add the features of a batch, label by label."""
    w_k, table = carry["model"], carry["prototypes"]
    params, buffers = only(w_k, model.param_names), only(w_k, model.buffer_names)
    features = model(params, buffers, batch.x, mode="eval", key=batch.key).features
    marks = batch.marks(len(table["count"]))
    # not a matrix product: tf32 would round the features
    total = table["sum"] + (marks.unsqueeze(-1) * features.unsqueeze(1)).sum(0)
    return {**carry, "prototypes": {"sum": total, "count": table["count"] + marks.sum(0)}}


def _finish(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
    return {"prototypes": carry["prototypes"]}, memo
