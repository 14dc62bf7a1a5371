"""RegMean: Jin, Ren, Preotiuc-Pietro, Cheng, "Dataless knowledge fusion by merging weights of
language models", ICLR 2023, arXiv:2212.09849.

    W = (sum_k G_k)^-1 sum_k G_k W_k   for each linear layer (W in rows of inputs)
    G_k = alpha X_k' X_k + (1 - alpha) diag(X_k' X_k),   X_k = the inputs of the layer in w_k

A piece to put after any method that trains locally: fedavg() | regmean(). The average of a linear
layer becomes the layer whose outputs are nearest to those of the clients' own layers on the
clients' inputs: a least-squares problem that the server solves from sums. Clients read their
examples once more with their trained model, in evaluation mode, and upload G_k and G_k (W_k - W_t),
with W_t the average, in a separate exchange.

It is for layers of the class `torch.nn.Linear` whose weight is trained, is used in one place of the
network and is shared among clients, with at most 4096 inputs, since G_k has the square of
them. All other tensors stay as the method before it made them: convolutions, norms, embeddings,
biases, attention's projections that are no separate layers, tied weights, and layers whose
input does not have the examples on its first axis. A network without such a layer is refused.

`epsilon` times the mean of G's diagonal is added to the diagonal of G: inputs that are always zero
do not change the average. Clients have the weight of their examples; in the paper all have as
many.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from feddkd.data.batches import Reads
from feddkd.errors import InputError
from feddkd.method import Batch, Collect, Fold, Method, Phase, World
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model
from feddkd.models.layer_inputs import layer_inputs
from feddkd.spec.types import Positive, Share
from feddkd.tensors import Groups, Tensors, combine, only

AT_ONCE = 1000  # examples in one step
WIDEST = 4096  # number of a layer's inputs


@METHODS.register
def regmean(*, alpha: Share = 0.9, epsilon: Positive = 1e-6) -> Method:
    """The method before it, with linear layers that regress to the clients' outputs on average."""
    phase = Phase(
        name="regress",
        client=Fold(_start, _step, partial(_finish, alpha)),
        server=partial(_solve, epsilon),
        reads=Reads(AT_ONCE, random=False),
        collect={"gram": Collect.MEAN_BY_CLIENTS, "product": Collect.MEAN_BY_CLIENTS},
        refines=True,
        needs=frozenset({"model"}),
        opens=_check,
    )
    return Method((phase,))


def regressed_layers(model: Model, shared: Tensors) -> dict[str, str]:
    """Return the linear layers that take part, as names of their weights -> names of layers."""
    slots = list(model.tensors.slots.values())
    found = {}
    for layer, module in model.net.named_modules():
        # attention uses the weights of such a layer without calling it
        if isinstance(module, NonDynamicallyQuantizableLinear) or not isinstance(module, nn.Linear):
            continue
        weight = f"{layer}.weight" if layer else "weight"
        if weight in shared and slots.count(weight) <= 1 and module.in_features <= WIDEST:
            found[weight] = layer
    return found


def _check(model: Model, state: Groups, world: World) -> Groups:
    """Raise InputError if there is no layer to regress."""
    if not regressed_layers(model, state["params"]):
        raise InputError(
            "regmean: this network has no linear layer (torch.nn.Linear) that is trained, shared"
            f" and has at most {WIDEST} inputs"
        )
    return {}


# --- the client's half


def _start(model: Model, sent: Groups, memo: Groups) -> Groups:
    weights = only(sent["params"], regressed_layers(model, sent["params"]))
    gram = combine(
        lambda w: w.new_zeros(w.shape[1], w.shape[1], dtype=torch.float64),  # tf32 would round it
        weights,
    )
    return {"model": memo["model"], "gram": gram}


def _step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
    """Add X' X of a batch, layer by layer."""
    w_k, gram = carry["model"], dict(carry["gram"])
    layers = regressed_layers(model, sent["params"])
    params, buffers = only(w_k, model.param_names), only(w_k, model.buffer_names)
    inputs = layer_inputs(model, params, buffers, batch.x, batch.key, frozenset(layers.values()))
    present = (batch.share > 0).double()
    for weight, layer in layers.items():
        for x in inputs.get(layer, ()):
            if x.dim() > 1 and len(x) == len(present):
                rows = x.double() * present.reshape(-1, *(1,) * (x.dim() - 1))
                rows = rows.flatten(0, -2)
                gram[weight] = gram[weight] + rows.T @ rows
    return {**carry, "gram": gram}


def _finish(
    alpha: float, model: Model, sent: Groups, carry: Groups, memo: Groups
) -> tuple[Groups, Groups]:
    """Upload G_k and, with W a row for each output, (W_k - W_t) G_k."""

    def regular(gram: Tensor) -> Tensor:
        return alpha * gram + (1 - alpha) * torch.diag_embed(gram.diagonal())

    gram, w_t = combine(regular, carry["gram"]), sent["params"]
    product = combine(lambda g, new, old: (new - old).double() @ g, gram, carry["model"], w_t)
    upload: Groups = {"gram": gram, "product": product}
    return {
        group: combine(lambda tensor, w: tensor.to(w.dtype), tensors, w_t)
        for group, tensors in upload.items()
    }, memo


# --- the server's half


def _solve(
    epsilon: float, model: Model, state: Groups, collected: Groups, rates: Tensors
) -> Groups:
    """Take W_t + sum_k (W_k - W_t) G_k (sum_k G_k + ridge)^-1."""

    def solve(gram: Tensor, product: Tensor, w: Tensor) -> Tensor:
        gram, product = gram.double(), product.double()
        ridge = (epsilon * gram.diagonal().mean()).clamp(min=torch.finfo(torch.float32).tiny)
        regular = gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        moved: Tensor = w + torch.linalg.solve(regular, product, left=False).to(w.dtype)
        return moved

    solved = combine(solve, collected["gram"], collected["product"], state["params"])
    return {**state, "params": {**state["params"], **solved}}
