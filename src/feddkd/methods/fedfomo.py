"""FedFomo: Zhang, Sapra, Fidler, Yeung, Alvarez, "Personalized federated learning with first order
model optimization", ICLR 2021, arXiv:2012.08565.

    client: v_n = ( L_k(w_k) - L_k(w_n) ) / |w_n - w_k|,   L_k = loss on examples kept aside
            u_k = w_k + sum_n c_n (w_n - w_k),   c_n = max(v_n, 0) / sum_i max(v_i, 0)
            w_k <- local training from u_k on the other examples
    server: P_kn <- P_kn + v_n;   sends client k the models w_n of the `models` largest P_kn

Every client has its own model and moves it towards those models of others that are better on its
examples. The server holds the last model of each client. In each place of the `models`, with the
probability `exploration`, it sends a client drawn at random in place of the next by P. Those that
have not been asked yet are never sent, so the first round of a client is local training alone.

While a client can be sent fewer models, the rest of its message has no meaning, but its bytes
count.

A client keeps `spare` of its examples aside in all rounds, at most half of them, and does not train
on them. Other models are judged with their own running statistics of batch norm; only parameters
are mixed. The paper lowers `exploration` from round to round and sends the models of the round
before alone; its 0.3 and 5 models are from memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.func import vmap

from feddkd.data.batches import Reads
from feddkd.method import Batch, Collect, Fold, Method, Part, Phase, World, own_model
from feddkd.methods.local import Local, Variant, local_training, take_average
from feddkd.methods.losses import task_loss
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model
from feddkd.randomness import fold, generator
from feddkd.spec.types import Count, Momentum
from feddkd.tensors import Groups, Tensors, add, combine, norm

TINY = 1e-12  # added to a distance, which is 0 between equal models
# groups of the state: the clients' last models, and what is known of who helps whom
TABLES, LEDGER = {"params": "fomo_params", "buffers": "fomo_buffers"}, "fedfomo"


@METHODS.register
def fedfomo(
    local: Local, *, models: Count = 5, spare: Count = 64, exploration: Momentum = 0.3
) -> Method:
    """Own models drawn to better ones: u_k = w_k + sum_n c_n (w_n - w_k), then local training."""
    aside = Reads(spare, steps=1, spare=spare, lasting=True, aside=True, random=False)
    weighing = Phase(
        name="weigh",
        client=Fold(_start, _judge, _mix),
        server=partial(_note, models, exploration),
        reads=aside,
        collect={"value": Collect.EVERY},
        sends=(),
        parts=partial(_parts, models, exploration),
        opens=_open,
    )
    variant = Variant(
        part=lambda model, sent, carry, memo: (
            {"own": carry["params"], "own_buffers": carry["buffers"]},
            {},
        ),
        server=_store,
        collect={"own": Collect.EVERY, "own_buffers": Collect.EVERY},
        private="model",
    )
    train = local_training(local, variant)
    (phase,) = train.phases
    reads = replace(phase.reads, spare=spare, lasting=True)
    return replace(train, phases=(weighing, replace(phase, reads=reads)))


# --- the server's half


def _open(model: Model, state: Groups, world: World) -> Groups:
    """Return empty tables of the clients' models, and P = 0."""
    clients, start = world.clients, dict(zip(TABLES, model.start(), strict=True))

    def empty(tensor: Tensor) -> Tensor:
        like = tensor.to(world.like) if tensor.is_floating_point() else tensor.to(world.like.device)
        return like.new_zeros(clients, *tensor.shape)

    zero = torch.zeros(clients, clients, dtype=torch.float64)
    ledger = {
        "key": torch.tensor(fold(("fedfomo", *world.key))),
        "round": torch.tensor(0),
        "seen": torch.zeros(clients, dtype=torch.int64),
        "affinity": zero,
    }
    return {**{TABLES[group]: combine(empty, start[group]) for group in TABLES}, LEDGER: ledger}


def chosen(ledger: Tensors, client: int, models: int, exploration: float) -> list[int]:
    """Return the clients whose models a client is sent: fewer than `models` if there are fewer."""
    others = [n for n in ledger["seen"].nonzero().flatten().tolist() if n != client]
    worth = ledger["affinity"][client].tolist()
    left = sorted(others, key=lambda n: -worth[n])
    random = generator(("fedfomo", int(ledger["key"]), int(ledger["round"]), client))
    found: list[int] = []
    while left and len(found) < models:
        explores = random.random() < exploration
        found.append(left.pop(int(random.integers(len(left))) if explores else 0))
    return found


def _parts(
    models: int, exploration: float, state: Groups, cohort: Sequence[int], step: int
) -> list[Part]:
    """Send each client the models of others, if there are any; places without one have mark 0."""
    parts = []
    for client in cohort:
        found = chosen(state[LEDGER], client, models, exploration)
        rows = torch.tensor(found + [client] * (models - len(found)))
        sent: Groups = {
            f"others {group}": combine(_rows(rows), state[table]) for group, table in TABLES.items()
        }
        marks = state[LEDGER]["seen"][rows] * (torch.arange(models) < len(found))
        if found:
            parts.append(Part((client,), {**sent, "marks": {"on": marks}}))
    return parts


def _rows(rows: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda table: table[rows.to(table.device)]


def _note(
    models: int,
    exploration: float,
    model: Model,
    state: Groups,
    collected: Groups,
    rates: Tensors,
) -> Groups:
    """Add the values v_n to P."""
    ledger, values = state[LEDGER], collected["value"]["of"].double()
    affinity = ledger["affinity"].clone()
    for place, client in enumerate(rates["clients"].tolist()):
        found = chosen(ledger, client, models, exploration)
        affinity[client, found] += values[place, : len(found)].to(affinity.device)
    return {**state, LEDGER: {**ledger, "affinity": affinity}}


def _store(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
    """Write the clients' models into the tables."""
    clients = rates["clients"]
    uploads = {"params": "own", "buffers": "own_buffers"}
    tables = {
        table: combine(
            lambda old, new: old.index_copy(0, clients, new), state[table], collected[upload]
        )
        for (group, table), upload in zip(TABLES.items(), uploads.values(), strict=True)
    }
    ledger = state[LEDGER]
    seen = ledger["seen"].index_fill(0, clients.to(ledger["seen"].device), 1)
    after = take_average(model, state, collected, rates)
    return {**after, **tables, LEDGER: {**ledger, "seen": seen, "round": ledger["round"] + 1}}


# --- the client's half


def _start(model: Model, sent: Groups, memo: Groups) -> Groups:
    params, buffers = own_model(model, {"params": {}, "buffers": {}}, memo)
    zero = torch.zeros_like(sent["marks"]["on"], dtype=next(iter(params.values())).dtype)
    return {"params": params, "buffers": buffers, "value": {"of": zero}}


def _judge(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
    """Return v_n of the models that were sent."""

    def loss(params: Tensors, buffers: Tensors) -> Tensor:
        output = model(params, buffers, batch.x, mode="eval", key=batch.key)
        return task_loss(model, output.logits, batch)

    def value(params: Tensors, buffers: Tensors) -> Tensor:
        distance = norm(add(params, carry["params"], -1)) + TINY
        worth: Tensor = (here - loss(params, buffers)) / distance
        return worth

    here = loss(carry["params"], carry["buffers"])
    values: Tensor = vmap(value)(sent["others params"], sent["others buffers"])
    return {**carry, "value": {"of": values * sent["marks"]["on"]}}


def _mix(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
    """Keep u_k as the own model, and upload the values."""
    good = carry["value"]["of"].clamp(min=0)
    c = good / torch.where(good.sum() > 0, good.sum(), 1)

    def move(w: Tensor, others: Tensor) -> Tensor:
        moved: Tensor = w + torch.tensordot(c, others - w, 1)
        return moved

    mixed = combine(move, carry["params"], sent["others params"])
    return {"value": carry["value"]}, {**memo, "private": {**memo["private"], **mixed}}
