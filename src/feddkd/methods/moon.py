"""MOON: Li, He, Song, "Model-contrastive federated learning", CVPR 2021, arXiv:2103.16257.

    local loss = CE - mu log( e^(cos(z, z_glob)/T) / (e^(cos(z, z_glob)/T) + e^(cos(z, z_prev)/T)) )

z is the input of the last layer in the local model, z_glob that in the model that was sent and
z_prev that in the client's previous local model. The latter two models are in evaluation mode, as
in the published code. That code puts a projection head (two layers, 256 outputs) between encoder
and classifier and takes z from it; here such a head must be part of the network. In round 1 the
previous model is the initial global model, so the contrast is constant; the code has no contrast in
round 1.
"""

from functools import partial

from torch import Tensor

from feddkd.errors import InputError
from feddkd.method import Batch, Method, World, own_model, uploads
from feddkd.methods.aggregation import Gathering
from feddkd.methods.local import Local, Variant, hold_private, local_training
from feddkd.methods.losses import FEATURES, contrast
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model, Output
from feddkd.spec.types import NonNegative, Positive
from feddkd.tensors import Groups, Tensors, only


@METHODS.register
def moon(
    local: Local, gathering: Gathering, *, mu: NonNegative = 1.0, temperature: Positive = 0.5
) -> Method:
    """Features pulled to the global model's: loss = CE - mu log softmax(cos/T)[glob]."""
    variant = Variant(
        terms=(partial(_term, mu, temperature),),
        begin=_begin,
        part=_remember,
        keeps=frozenset({"previous"}),
        brings=_initial,
        requires=FEATURES,
    )
    return local_training(local, variant, gathering)


def _initial(model: Model, state: Groups, world: World) -> Groups:
    """Return the initial global model as the client's first previous model."""
    if model.head is None:
        raise InputError(
            "moon compares inputs of the last linear layer, and this network has no linear layer"
        )
    return {"previous": {**state["params"], **state["buffers"]}}


def _begin(model: Model, sent: Groups, memo: Groups) -> Groups:
    """Return the groups of the carry: private tensors and the previous local model.

    The memo's private tensors are still those of the previous local model.
    """
    previous = memo["previous"]
    shared = {
        "params": only(previous, model.param_names),
        "buffers": only(previous, model.buffer_names),
    }
    params, buffers = own_model(model, shared, memo)
    return {
        **hold_private(model, sent, memo),
        "previous_params": params,
        "previous_buffers": buffers,
    }


def _term(
    mu: float,
    temperature: float,
    model: Model,
    w: Tensors,
    sent: Groups,
    carry: Groups,
    output: Output,
    batch: Batch,
) -> Tensor:
    def features(params: Tensors, buffers: Tensors) -> Tensor:
        return model(params, buffers, batch.x, mode="eval", key=batch.key).features

    z_glob = features(*own_model(model, sent, carry))
    z_prev = features(carry["previous_params"], carry["previous_buffers"])
    return mu * contrast(output.features, z_glob, z_prev, batch, temperature)


def _remember(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
    """Return the shared part of the local model for the memo."""
    shared, _ = uploads(model, carry["params"], carry["buffers"], memo)
    return {}, {"previous": {**shared["params"], **shared["buffers"]}}
