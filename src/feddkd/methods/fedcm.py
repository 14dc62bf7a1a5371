"""FedCM: Xu, Wang, Wang, Yao, "FedCM: federated learning with client-level momentum",
arXiv:2106.10874.

    client: w <- w - lr (alpha g + (1 - alpha) D_t)
    server: D_{t+1} = (w_t - wbar) / (K lr),   w_{t+1} = wbar = sum_k n_k / (sum_i n_i) w_k

D_t is the mean direction of the last round, zero in the first. Clients receive it and upload
nothing more than FedAvg's model and K, the number of local steps. K is the mean over clients,
weighted as the models are. The published code takes K and clients of one size; it also clips
gradients at norm 10. The server's step size is 1, as in that code. With local momentum, K is the
number of steps of plain SGD that would lead equally far. Weight decay is added to the direction.
Private parameters move along g.
"""

from functools import partial

from feddkd.method import Collect, Method, World
from feddkd.methods.local import Local, Variant, local_training, reach, take_average
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model
from feddkd.spec.types import Share
from feddkd.tensors import Groups, Tensors, combine, zeros


@METHODS.register
def fedcm(local: Local, *, alpha: Share = 0.1) -> Method:
    """FedAvg with momentum in local steps: w <- w - lr (alpha g + (1 - alpha) D_t)."""
    return local_training(local, client_momentum(local, alpha, "fedcm"))


def client_momentum(local: Local, alpha: float, method: str) -> Variant:
    """Return the variant of local training in which clients follow the last round's direction."""
    begin, watch = reach(local, method)
    return Variant(
        begin=begin,
        bend=partial(_mix, alpha),
        watch=watch,
        part=lambda model, sent, carry, memo: ({"reach": {"a": carry["reach"]["a"]}}, {}),
        server=_server,
        collect={"reach": Collect.MEAN_BY_EXAMPLES},
        sends=("direction",),
        opens=_no_direction,
    )


def _no_direction(model: Model, state: Groups, world: World) -> Groups:
    return {"direction": zeros(state["params"])}


def _mix(alpha: float, gradient: Tensors, sent: Groups, carry: Groups) -> Tensors:
    """Return alpha g + (1 - alpha) D_t for shared parameters, g for private ones."""
    mixed = combine(lambda d, g: alpha * g + (1 - alpha) * d, sent["direction"], gradient)
    return {**gradient, **mixed}


def _server(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
    """Take the average, and its direction (w_t - wbar) / (K lr) for the next round."""
    length = collected["reach"]["a"] * rates["lr"]
    direction = combine(
        lambda w_t, mean: (w_t - mean) / length, state["params"], collected["params"]
    )
    return {**take_average(model, state, collected, rates), "direction": direction}
