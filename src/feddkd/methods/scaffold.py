"""SCAFFOLD: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: stochastic controlled
averaging for federated learning", ICML 2020, arXiv:1910.06378.

    w <- w - lr (g - c_k + c),   c_k+ = c_k - c + (w_t - w_k) / (K lr),   c <- c + (m/N) mean_k (c_k+ - c_k)

This is option II of the paper: c_k+ costs no further pass over the data. The clients' models are
averaged by examples, as in FedAvg, where the paper (clients of one size) weighs them alike; the
server's step is 1, as in its experiments. With local momentum K becomes the number of plain steps
that would lead as far, as in FedNTD's code; the correction goes into the momentum as part of the
gradient. Weight decay counts as part of the gradient, too. Private parameters are left uncorrected.
"""

from feddkd.method import Collect, Method, World
from feddkd.methods.local import Local, Variant, local_training, reach, take_average
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model
from feddkd.tensors import Groups, Tensors, add, combine, zeros


@METHODS.register
def scaffold(local: Local) -> Method:
    """FedAvg with client drift corrected by control variates: w <- w - lr (g - c_k + c)."""
    begin, watch = reach(local, "scaffold")
    variant = Variant(
        begin=lambda model, sent, memo: {**begin(model, sent, memo), "control": memo["control"]},
        bend=_correct,
        watch=watch,
        part=_renew,
        server=_server,
        collect={"control": Collect.MEAN_BY_CLIENTS},
        sends=("control",),
        keeps=frozenset({"control"}),
        opens=_nothing_yet,
        brings=_nothing_yet,
    )
    return local_training(local, variant)


def _nothing_yet(model: Model, state: Groups, world: World) -> Groups:
    return {"control": zeros(state["params"])}


def _correct(gradient: Tensors, sent: Groups, carry: Groups) -> Tensors:
    return {
        **gradient,
        **combine(lambda c, c_k, g: g - c_k + c, sent["control"], carry["control"], gradient),
    }


def _renew(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
    lengths = carry["reach"]["a"] * sent["rates"]["lr"]
    slope = combine(lambda w_t, w_k: (w_t - w_k) / lengths, sent["params"], carry["params"])
    change = add(slope, sent["control"], -1)
    return {"control": change}, {"control": add(memo["control"], change)}


def _server(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
    control = add(state["control"], collected["control"], rates["share"])
    return {**take_average(model, state, collected, rates), "control": control}
