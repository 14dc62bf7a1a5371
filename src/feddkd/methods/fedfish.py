"""FedFish: Dhawan, Mitchell, Charles, Garrett, Dziugaite, "Leveraging function space aggregation
for federated learning at scale", arXiv:2311.10291; for one round also: Jhunjhunwala, Wang, Joshi,
"FedFisher: leveraging Fisher information for one-shot federated learning", arXiv:2403.12329.

    w_{t+1} = sum_k n_k F_k w_k / sum_k n_k F_k   (by element)
    F_k = mean over the mini-batches of g * g,   g = gradient of client k's loss at w_k

F_k estimates the diagonal of the Fisher information: where it is large, the function that client k
has learned depends on the number, and that client has more weight in the mean. After `epochs`
epochs of local training a client reads its examples once more, with its weights fixed, for F_k; it
uploads F_k with its model. We could read neither paper's text in full: that F_k is taken after
training, from gradients of mini-batches, is ours. `epsilon` is added to F_k, so numbers on which no
function depends are plainly averaged. The option `steps` does not go with the pass for F_k.

DKD, too, averages functions and not weights, but without an expansion around w_k: FedFish replaces
the distance of two functions by a quadratic form with a diagonal matrix, whose minimum is the mean
above; DKD takes steps down the divergence itself, on the clients' examples, and so needs further
exchanges. fedfish() | dkd() starts these steps from the weighted mean.
"""

from dataclasses import replace
from functools import partial

from torch import Tensor

from feddkd.errors import InputError
from feddkd.method import Collect, Method
from feddkd.methods.local import Local, Slope, Variant, counted, local_training, take_average
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model, Output
from feddkd.spec.types import Positive
from feddkd.tensors import Groups, Tensors, combine, zeros


@METHODS.register
def fedfish(local: Local, *, epsilon: Positive = 1e-12) -> Method:
    """Average by Fisher information: w = sum_k n_k F_k w_k / sum_k n_k F_k, F_k = mean of g * g."""
    if local.steps is not None:
        raise InputError("fedfish: steps does not go with the pass for F_k: give epochs")
    begin, watch = counted(partial(_begin, local.epochs))
    variant = Variant(
        begin=begin,
        take=_measure,
        holds=lambda model, carry: dict.fromkeys(carry["params"], _measures(carry)),
        watch=watch,
        part=lambda model, sent, carry, memo: ({"fisher": carry["fisher"]}, {}),
        server=partial(_server, epsilon),
        collect={"params": Collect.EVERY, "fisher": Collect.EVERY},
        facts=frozenset({"batches"}),
    )
    return local_training(replace(local, epochs=local.epochs + 1), variant)


def _begin(epochs: int, model: Model, sent: Groups, memo: Groups) -> Groups:
    """Return F_k before the first gradient, and the steps of training and of the pass after it."""
    batches = memo["facts"]["batches"]
    return {
        "fisher": zeros(sent["params"]),
        "stage": {"training": epochs * batches, "batches": batches},
    }


def _measures(carry: Groups) -> Tensor:
    return carry["progress"]["step"] >= carry["stage"]["training"]


def _measure(slope: Slope, sent: Groups, carry: Groups) -> tuple[Tensors, Output, Groups]:
    """Return the gradient at the weights, and F_k with its square added in the last pass."""
    gradient, output = slope(carry["params"])
    measures, batches = _measures(carry), carry["stage"]["batches"]

    def add_square(fisher: Tensor, g: Tensor) -> Tensor:
        return fisher + measures * g * g / batches

    return gradient, output, {"fisher": combine(add_square, carry["fisher"], gradient)}


def _server(
    epsilon: float, model: Model, state: Groups, collected: Groups, rates: Tensors
) -> Groups:
    """Take the mean of the models by n_k F_k; buffers are averaged by n_k."""
    n = rates["examples"]

    def mean(fisher: Tensor, w: Tensor) -> Tensor:
        weights = n.to(w.dtype).reshape(-1, *(1,) * (w.dim() - 1)) * (fisher + epsilon)
        return (weights * w).sum(0) / weights.sum(0)

    params = combine(mean, collected["fisher"], collected["params"])
    return {**take_average(model, state, collected, rates), "params": params}
