"""FedNova: Wang, Liu, Liang, Joshi, Poor, "Tackling the objective inconsistency problem in
heterogeneous federated optimization", NeurIPS 2020, arXiv:2007.07481.

    w_{t+1} = w_t - (sum_k p_k a_k) sum_k p_k (w_t - w_k) / a_k,   p_k = n_k / sum_i n_i
    a_k = K_k, the number of local steps of plain SGD

With local momentum, a_k is the sum of the weights that a client's gradients have in its move. The
published code computes it for Nesterov's momentum as for the heavy ball; here Nesterov's momentum
has its exact sum. Weight decay counts as part of the gradient, as in that code. Clients upload the
normalised move and a_k in place of w_k.
"""

from feddkd.method import Collect, Method
from feddkd.methods.local import Local, Variant, local_training, reach, take_average
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model
from feddkd.tensors import Groups, Tensors, add, combine


@METHODS.register
def fednova(local: Local) -> Method:
    """Average of normalised moves: w = w_t - (sum_k p_k a_k) sum_k p_k (w_t - w_k)/a_k."""
    begin, watch = reach(local, "fednova")
    variant = Variant(
        begin=begin,
        watch=watch,
        part=_normalise,
        server=_server,
        collect={"reach": Collect.MEAN_BY_EXAMPLES},
    )
    return local_training(local, variant)


def _normalise(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
    """Return (w_t - w_k) / a_k and a_k as the upload."""
    a = carry["reach"]["a"]
    move = combine(lambda w_t, w_k: (w_t - w_k) / a, sent["params"], carry["params"])
    return {"params": move, "reach": {"a": a}}, {}


def _server(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
    """Apply the mean of the normalised moves, times the mean of a_k."""
    moved = add(state["params"], collected["params"], -collected["reach"]["a"])
    return {**take_average(model, state, collected, rates), "params": moved}
