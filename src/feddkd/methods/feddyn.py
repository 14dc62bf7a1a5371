"""FedDyn: Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, "Federated learning based on
dynamic regularization", ICLR 2021, arXiv:2111.04263.

    w_k = local training on CE - <h_k, w> + alpha/2 |w - w_t|^2,   h_k <- h_k - alpha (w_k - w_t)
    h <- h - alpha/N sum_k (w_k - w_t),   w_{t+1} = mean_k w_k - h/alpha

The mean is over the active clients with equal weights, as in the paper; buffers are averaged by
examples, as in FedAvg. The published code divides alpha by a client's relative number of examples
and clips gradients at norm 10; here alpha is one number, as in the paper. Note that h/alpha does
not vanish with alpha: it is minus the sum of the mean moves of all rounds, each times the share of
active clients. So with a small alpha the model still moves further than the average.
"""

from dataclasses import replace
from functools import partial

from feddkd.method import Collect, Method, World
from feddkd.methods.aggregation import Gathering
from feddkd.methods.local import Local, Variant, local_training, take_average
from feddkd.methods.losses import linear, proximal
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model
from feddkd.spec.types import Positive
from feddkd.tensors import Groups, Tensors, add, combine, zeros


@METHODS.register
def feddyn(local: Local, gathering: Gathering, *, alpha: Positive = 0.01) -> Method:
    """FedAvg with losses that share one optimum: loss = CE - <h_k, w> + alpha/2 |w - w_t|^2."""
    variant = replace(
        dual_variables(alpha),
        terms=(linear("slope"), proximal(alpha, "sum")),
    )
    return local_training(local, variant, gathering)


def dual_variables(alpha: float) -> Variant:
    """Return the variant in which clients and server keep h_k and h, without the loss terms."""
    return Variant(
        begin=lambda model, sent, memo: {"slope": memo["slope"]},
        part=partial(_renew, alpha),
        server=partial(_server, alpha),
        collect={"params": Collect.MEAN_BY_CLIENTS},
        keeps=frozenset({"slope"}),
        opens=_zero_slope,
        brings=_zero_slope,
    )


def _zero_slope(model: Model, state: Groups, world: World) -> Groups:
    """Return the initial h, or the initial h_k: zeros."""
    return {"slope": zeros(state["params"])}


def _renew(
    alpha: float, model: Model, sent: Groups, carry: Groups, memo: Groups
) -> tuple[Groups, Groups]:
    """Return h_k - alpha (w_k - w_t) for the memo; nothing more to upload."""
    h = combine(
        lambda h_k, w_k, w_t: h_k - alpha * (w_k - w_t),
        memo["slope"],
        carry["params"],
        sent["params"],
    )
    return {}, {"slope": h}


def _server(alpha: float, model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
    """Take h <- h - alpha/N sum_k (w_k - w_t) and w = mean_k w_k - h/alpha."""
    pull = alpha * rates["share"]
    h = combine(
        lambda h, w, w_t: h - pull * (w - w_t), state["slope"], collected["params"], state["params"]
    )
    after = take_average(model, state, collected, rates)
    return {**after, "params": add(collected["params"], h, -1 / alpha), "slope": h}
