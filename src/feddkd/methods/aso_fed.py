"""ASO-Fed: Chen, Ning, Slawski, Rangwala, "Asynchronous online federated learning for edge devices
with non-IID data", IEEE BigData 2020, arXiv:1911.02134.

    client: w_k <- w_k - r_k lr (g - v + h),   h <- beta h + (1 - beta) v,   v <- g
            g = grad[ f_k(w_k) + lam/2 |w_k - w_k_old|^2 ],   r_k = max(1, log(mean delay))
    server: w <- w - n_k/N (w_k_old - w_k)

The server does not wait: it folds in each model when it arrives, and sends the result back to that
client alone. So a client trains from the model w_k_old that it received after its last arrival;
the server's w has moved since. v is the client's last gradient and h the decayed mean of those
before; both are zero at first and stay with the client.

There is no clock here: the order of arrivals is drawn by key, and delays are counted in arrivals
(arrivals.py). N is the number of examples of all clients; those that the server has not heard from
count as the mean of the others. Running statistics are mixed, b <- b + n_k/N (b_k - b), since a
variance must not become negative. Clients have all their examples from the start: the paper's data
streams are not included. Weight decay, which the paper lacks, is no part of g and is not multiplied
by r_k. DKD behind it is synchronous: its J steps wait for the cohort of the round.

`feature_learning=True` adds the paper's last step of an arrival, w1_ij <- softmax_j(|w1_ij|) w1_ij,
where w1 is the weight of the first layer, a row for each output. It divides the layer by about its
number of inputs, once more at every arrival, so the network soon ignores its input. Therefore it is
not the default.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from feddkd.errors import InputError
from feddkd.method import Collect, Method, Part, World
from feddkd.methods.arrivals import mean_delays, note_arrivals, open_ledger, shares
from feddkd.methods.local import Local, Slope, Variant, local_training
from feddkd.methods.losses import proximal
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model, Output
from feddkd.spec.types import Bound, NonNegative
from feddkd.tensors import Groups, Tensors, combine, stack, zeros

Decay = Annotated[float, Bound(least=0, most=1)]
# groups of the state: who arrived when, and the model that each client received
LEDGER, TABLES = "aso_fed", {"params": "received_params", "buffers": "received_buffers"}


@METHODS.register
def aso_fed(
    local: Local,
    *,
    lam: NonNegative = 1.0,
    beta: Decay = 0.001,
    feature_learning: bool = False,
) -> Method:
    """Asynchronous training, one arrival after another: w <- w - n_k/N (w_k_old - w_k)."""
    if local.optimiser != "sgd":
        raise InputError(
            "aso_fed multiplies the steps of SGD by a factor for each client;"
            f" optimiser={local.optimiser!r} does not go with it"
        )
    variant = Variant(
        terms=(proximal(lam, "sum"),),
        begin=lambda model, sent, memo: {"last": memo["last"], "decayed": memo["decayed"]},
        take=partial(_balance, beta),
        part=lambda model, sent, carry, memo: (
            {},
            {"last": carry["last"], "decayed": carry["decayed"]},
        ),
        server=partial(_arrive, feature_learning),
        collect={"params": Collect.EVERY, "buffers": Collect.EVERY},
        keeps=frozenset({"last", "decayed"}),
        opens=partial(_open, feature_learning),
        brings=_bring,
    )
    (phase,) = local_training(local, variant).phases
    return Method((replace(phase, sends=(), parts=_parts),))


# --- the client's half


def _bring(model: Model, state: Groups, world: World) -> Groups:
    """Return the last gradient v and the decayed mean h before the first step: zeros."""
    return {"last": zeros(state["params"]), "decayed": zeros(state["params"])}


def _balance(
    beta: float, slope: Slope, sent: Groups, carry: Groups
) -> tuple[Tensors, Output, Groups]:
    """Return r_k (g - v + h) for shared parameters, r_k g for private ones, and new v and h."""
    gradient, output = slope(carry["params"])
    v, h, pace = carry["last"], carry["decayed"], sent["pace"]["factor"]
    balanced = combine(lambda v, h, g: g - v + h, v, h, gradient)
    decayed = combine(lambda h, v: beta * h + (1 - beta) * v, h, v)
    direction = combine(lambda g: pace * g, {**gradient, **balanced})
    last = {name: gradient[name] for name in v}
    return direction, output, {"last": last, "decayed": decayed}


# --- the server's half


def _open(feature_learning: bool, model: Model, state: Groups, world: World) -> Groups:
    """Return the table of the models that clients received, the initial one, and no arrivals."""
    if feature_learning:
        first_weight(model, state["params"])
    copies = {
        table: combine(lambda tensor: torch.stack([tensor] * world.clients), state[group])
        for group, table in TABLES.items()
    }
    return {LEDGER: open_ledger(world), **copies}


def first_weight(model: Model, params: Tensors) -> str:
    """Return the name of the first layer's weight, or raise InputError if there is none."""
    names = [name for name, _ in model.net.named_parameters()]
    found = [name for name in names if name in params and params[name].dim() > 1]
    if not found:
        raise InputError(
            "aso_fed scales the weight of the first layer, and no matrix of this network is"
            " trained and shared: set feature_learning=False"
        )
    return found[0]


def _parts(state: Groups, cohort: Sequence[int], step: int) -> list[Part]:
    """Send each client of the cohort the model that it received at its last arrival, and r_k."""
    like = next(iter(state["params"].values()), state[LEDGER]["examples"])
    logs = mean_delays(state[LEDGER]).clamp(min=1).log()
    factors = logs.clamp(min=1).to(like.device, like.dtype)

    def part(client: int) -> Part:
        model = {group: _row(state[table], client) for group, table in TABLES.items()}
        return Part((client,), {**model, "pace": {"factor": factors[client]}})

    return [part(client) for client in cohort]


def _row(table: Tensors, number: int) -> dict[str, Tensor]:
    return combine(lambda tensor: tensor[number], table)


def _arrive(
    feature_learning: bool, model: Model, state: Groups, collected: Groups, rates: Tensors
) -> Groups:
    """Fold in the models one after another; a client receives what its arrival has made."""
    order, ledger = note_arrivals(state[LEDGER], rates)
    clients, share = rates["clients"].tolist(), shares(ledger).tolist()
    now: Groups = {group: state[group] for group in TABLES}
    made: dict[str, list[Tensors]] = {group: [] for group in TABLES}
    for place in order:
        client = clients[place]
        upload = {group: _row(collected[group], place) for group in TABLES}
        params = _moved(now["params"], _row(state[TABLES["params"]], client), upload, share[client])
        if feature_learning:
            params = scale_features(params, first_weight(model, params))
        now = {"params": params, "buffers": _mixed(now["buffers"], upload, share[client])}
        for group in TABLES:
            made[group].append(now[group])
    where = rates["clients"][order]
    tables = {
        table: combine(
            lambda old, new: old.index_copy(0, where, new), state[table], stack(made[group])
        )
        for group, table in TABLES.items()
    }
    return {**state, **now, **tables, LEDGER: ledger}


def _moved(w: Tensors, old: Tensors, upload: Groups, share: float) -> dict[str, Tensor]:
    """Return w - n_k/N (w_k_old - w_k)."""
    return combine(lambda w, old, new: w - share * (old - new), w, old, upload["params"])


def _mixed(buffers: Tensors, upload: Groups, share: float) -> dict[str, Tensor]:
    """Return b + n_k/N (b_k - b); of whole numbers (counters) the larger one."""

    def mix(b: Tensor, new: Tensor) -> Tensor:
        return b + share * (new - b) if b.is_floating_point() else torch.maximum(b, new)

    return combine(mix, buffers, upload["buffers"])


def scale_features(w: Tensors, name: str) -> dict[str, Tensor]:
    """Return the weights with softmax_j(|w_ij|) w_ij in the named one, a row for each output."""
    rows = w[name].flatten(1)
    return {**w, name: (rows.abs().softmax(1) * rows).reshape(w[name].shape)}
