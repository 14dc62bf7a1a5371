"""FedSMOO: Sun, Shen, Chen, Ding, Tao, "Dynamic regularized sharpness aware minimization in
federated learning: approaching global consistency and smooth landscape", ICML 2023,
arXiv:2305.11584.

    client: e = rho d / |d|,   d = grad f_k(w) - mu_k - s,   mu_k <- mu_k + e - s
            w <- w - lr (grad f_k(w + e) - h_k + alpha (w - w_t)),   h_k as in FedDyn
    server: s = rho mean_k mu_k / |mean_k mu_k|,   w_{t+1} = mean_k w_k - h/alpha as in FedDyn

mu_k draws the perturbations of all clients to one, s, as h_k draws their models to one. mu_k stays
with its client; it is uploaded in addition to the model, and s is sent in addition to it. This is
the form of the authors' code, which leaves a small term with the last e out of the mean of mu_k; it
also clips gradients at norm 10. Private parameters are perturbed along d = grad f_k(w).
"""

from dataclasses import replace
from functools import partial

from feddkd.method import Collect, Method
from feddkd.methods.feddyn import dual_variables
from feddkd.methods.fedspeed import prox_corrected
from feddkd.methods.local import Local, Slope, Variant, local_training
from feddkd.methods.registry import METHODS
from feddkd.methods.sharpness import scaled
from feddkd.models.functional import Model, Output
from feddkd.spec.types import NonNegative, Positive
from feddkd.tensors import Groups, Tensors, add, combine, zeros


@METHODS.register
def fedsmoo(local: Local, *, alpha: Positive = 0.1, rho: NonNegative = 0.1) -> Method:
    """FedSpeed with one perturbation for all: e = rho d/|d|, d = grad f_k(w) - mu_k - s."""
    return local_training(local, _with_shared_perturbation(dual_variables(alpha), alpha, rho))


def _with_shared_perturbation(variant: Variant, alpha: float, rho: float) -> Variant:
    """Return FedDyn's variant with the variables mu_k and s in addition to h_k and h."""
    begin, part, server, opens = variant.begin, variant.part, variant.server, variant.opens
    assert server is not None
    assert opens is not None

    def part_of_both(
        model: Model, sent: Groups, carry: Groups, memo: Groups
    ) -> tuple[Groups, Groups]:
        upload, kept = part(model, sent, carry, memo)
        return {**upload, "mu": carry["mu"]}, {**kept, "mu": carry["mu"]}

    def server_of_both(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
        after = server(model, state, collected, rates)
        return {**after, "s": scaled(collected["mu"], rho)}

    return replace(
        variant,
        begin=lambda model, sent, memo: {**begin(model, sent, memo), "mu": memo["mu"]},
        take=partial(_take, rho),
        bend=partial(prox_corrected, alpha),
        part=part_of_both,
        server=server_of_both,
        collect={**variant.collect, "mu": Collect.MEAN_BY_CLIENTS},
        sends=("s",),
        keeps=variant.keeps | {"mu"},
        opens=lambda model, state, world: {**opens(model, state, world), "s": _zero(state)},
        brings=lambda model, state, world: {**opens(model, state, world), "mu": _zero(state)},
    )


def _zero(state: Groups) -> Tensors:
    return zeros(state["params"])


def _take(rho: float, slope: Slope, sent: Groups, carry: Groups) -> tuple[Tensors, Output, Groups]:
    """Return the gradient at w + e, the output at w, and the new mu_k."""
    gradient, output = slope(carry["params"])
    towards = combine(lambda mu, s, g: g - mu - s, carry["mu"], sent["s"], gradient)
    e = scaled({**gradient, **towards}, rho)
    steep, _ = slope(add(carry["params"], e))
    mu = combine(lambda mu, s, e: mu + e - s, carry["mu"], sent["s"], e)
    return steep, output, {"mu": mu}
