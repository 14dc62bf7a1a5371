"""FedAMP: Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, "Personalized cross-silo federated learning on
non-IID data", AAAI 2021, arXiv:2007.03797.

    server: u_k = xi_kk w_k + sum_{j != k} xi_kj w_j,   xi_kk = 1 - sum_{j != k} xi_kj
            xi_kj = alpha/sigma exp(-|w_k - w_j|^2/sigma)
    client: w_k <- local training from w_k on CE + lam/2 |w - u_k|^2

Every client has its own model w_k, and the server sends it a mixture u_k of all models in which
those most like w_k weigh most. The server holds the last model of each client; those that have not
been asked yet have no part, so the first round of a client is local training alone. The default of
alpha is sigma / K for K clients, so that equal models have equal weights. A larger alpha than sigma
/ (K - 1), with which xi_kk could be negative, is refused. Only trained parameters are mixed;
running statistics stay with their client. `lam` stands for the paper's lambda / alpha, so that the
pull does not depend on the number of clients. The paper minimises at the clients; here they train
from their own model. HeurFedAMP is not included.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from feddkd.errors import InputError
from feddkd.method import Batch, Collect, Method, Part, World
from feddkd.methods.local import Local, Variant, local_training, take_average
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model, Output
from feddkd.spec.types import NonNegative, Positive
from feddkd.tensors import Groups, Tensors, combine


@METHODS.register
def fedamp(
    local: Local, *, lam: NonNegative = 1.0, sigma: Positive = 1.0, alpha: Positive | None = None
) -> Method:
    """Own models near a mixture of those like them: CE + lam/2 |w - sum_j xi_kj w_j|^2."""
    variant = Variant(
        terms=(_pull,),
        part=lambda model, sent, carry, memo: ({"own": carry["params"]}, {}),
        server=_store,
        collect={"own": Collect.EVERY},
        opens=partial(_open, sigma, alpha),
        private="model",
    )
    train = local_training(local, variant)
    phases = (replace(phase, parts=partial(_parts, lam, sigma)) for phase in train.phases)
    return replace(train, phases=tuple(phases))


def _open(sigma: float, alpha: float | None, model: Model, state: Groups, world: World) -> Groups:
    """Return an empty table of the clients' models, and alpha."""
    clients = world.clients
    if alpha is not None and alpha * (clients - 1) > sigma:
        raise InputError(
            f"fedamp: alpha={alpha} is above sigma / (K - 1) = {sigma / (clients - 1):.6g} for"
            f" {clients} clients, so a model could have a negative weight in its own mixture"
        )
    params, _ = model.start()
    table = combine(lambda tensor: world.like.new_zeros(clients, *tensor.shape), params)
    size = world.like.new_tensor(sigma / clients if alpha is None else alpha)
    return {"models": table, "amp": {"seen": world.like.new_zeros(clients), "alpha": size}}


# --- the server's half


def _parts(lam: float, sigma: float, state: Groups, cohort: Sequence[int], step: int) -> list[Part]:
    """Send each client its mixture, and how strongly its model is pulled there."""
    seen, alpha = state["amp"]["seen"], state["amp"]["alpha"]

    def part(client: int) -> Part:
        xi = weights(state["models"], seen, alpha, sigma, client)
        mixture = combine(lambda table: torch.tensordot(xi, table, 1), state["models"])
        pull = {"strength": seen[client] * lam}
        return Part((client,), {"mixture": mixture, "pull": pull})

    return [part(client) for client in cohort]


def weights(table: Tensors, seen: Tensor, alpha: Tensor, sigma: float, client: int) -> Tensor:
    """Return xi_kj of a client k for all clients j."""
    squares = [((rows - rows[client]) ** 2).flatten(1).sum(1) for rows in table.values()]
    xi = seen * alpha / sigma * torch.exp(-torch.stack(squares).sum(0) / sigma)
    others = torch.arange(len(xi), device=xi.device) != client
    return torch.where(others, xi, 1 - (xi * others).sum())


def _store(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
    """Write the clients' models into the table."""
    clients = rates["clients"]
    table = combine(
        lambda old, new: old.index_copy(0, clients, new), state["models"], collected["own"]
    )
    seen = state["amp"]["seen"].index_fill(0, clients, 1.0)
    after = take_average(model, state, collected, rates)
    return {**after, "models": table, "amp": {**state["amp"], "seen": seen}}


# --- the client's half


def _pull(
    model: Model, w: Tensors, sent: Groups, carry: Groups, output: Output, batch: Batch
) -> Tensor:
    squares = [((w[name] - u) ** 2).sum() for name, u in sent["mixture"].items()]
    return sent["pull"]["strength"] / 2 * torch.stack(squares).sum()
