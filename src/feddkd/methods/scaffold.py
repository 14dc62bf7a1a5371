"""SCAFFOLD: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: stochastic controlled
averaging for federated learning", ICML 2020, arXiv:1910.06378.

    client: w <- w - lr (g - c_k + c),   c_k+ = c_k - c + (w_t - w_k) / (K lr)
    server: c <- c + (m/N) mean_k (c_k+ - c_k),   w_{t+1} = sum_k n_k / (sum_i n_i) w_k

This is option II of the paper: c_k+ needs no further pass over the data. The clients' models are
averaged by examples, as in FedAvg; the paper, with clients of equal size, gives them equal weights.
The server's step size is 1, as in the paper's experiments. With local momentum, K is the number of
steps of plain SGD that would lead equally far, as in FedNTD's code; the correction is part of the
gradient that the momentum sums. Weight decay is part of the gradient, too. Private parameters are
not corrected.
"""

from feddkd.method import Collect, Method, World
from feddkd.methods.local import Local, Variant, local_training, reach, take_average
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model
from feddkd.tensors import Groups, Tensors, add, combine, zeros


@METHODS.register
def scaffold(local: Local) -> Method:
    """FedAvg with client drift corrected by control variates: w <- w - lr (g - c_k + c)."""
    return local_training(local, control_variates(local, "scaffold"))


def control_variates(local: Local, method: str) -> Variant:
    """Return the variant of local training with control variates."""
    begin, watch = reach(local, method)
    return Variant(
        begin=lambda model, sent, memo: {**begin(model, sent, memo), "control": memo["control"]},
        bend=_correct,
        watch=watch,
        part=_renew,
        server=_server,
        collect={"control": Collect.MEAN_BY_CLIENTS},
        sends=("control",),
        keeps=frozenset({"control"}),
        opens=_zero_control,
        brings=_zero_control,
    )


def _zero_control(model: Model, state: Groups, world: World) -> Groups:
    """Return the initial c, or the initial c_k: zeros."""
    return {"control": zeros(state["params"])}


def _correct(gradient: Tensors, sent: Groups, carry: Groups) -> Tensors:
    """Return g - c_k + c for shared parameters, g for private ones."""
    corrected = combine(lambda c, c_k, g: g - c_k + c, sent["control"], carry["control"], gradient)
    return {**gradient, **corrected}


def _renew(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
    """Return the upload c_k+ - c_k = (w_t - w_k) / (K lr) - c, and c_k+ for the memo."""
    length = carry["reach"]["a"] * sent["rates"]["lr"]
    slope = combine(lambda w_t, w_k: (w_t - w_k) / length, sent["params"], carry["params"])
    change = add(slope, sent["control"], -1)
    return {"control": change}, {"control": add(memo["control"], change)}


def _server(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
    """Take the average of the models, and c <- c + (m/N) mean_k (c_k+ - c_k)."""
    control = add(state["control"], collected["control"], rates["share"])
    return {**take_average(model, state, collected, rates), "control": control}
