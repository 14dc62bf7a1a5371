"""The quantities of the paper's theory, measured on the training examples of a round's clients at
the end of the round.

    L1' = 1/m sum_k E_{D_k} KL(y || f(w_k))
          between the labels and the clients' models
    L2' = 1/m sum_k E_{D_k} KL(f(w_k) || f(w))
          between the clients' models and the shared one, before DKD and after it

Proposition 1 bounds the squared total variation distance between labels and shared model by L1' +
L2'. Like evaluation this is an exchange, so only sums leave a client. The clients read their data
once more; this is not counted in a run's costs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax

from feddkd.data.batches import Reads
from feddkd.engines.interface import Engine, Order
from feddkd.method import Batch, Collect, Exchange, Fold, Phase, own_model
from feddkd.models.functional import Model
from feddkd.tensors import Groups, Tensors, combine, only

TALLIES = (
    "examples",
    "own_loss",
    "own_correct",
    "loss",
    "correct",
    "divergence",
    "average_divergence",
)


def diagnose(
    engine: Engine,
    states: Sequence[tuple[int, Groups, Groups]],
    cohorts: Sequence[tuple[int, ...]],
    retain: frozenset[str] | None,
) -> list[dict[str, Any]]:
    """Return the quantities by name for each (run, state at the end, state before DKD) and the
    clients that took part.

    Clients must still hold their models (memo group "model"). Afterwards they keep the groups in
    `retain`.
    """
    orders = []
    for (run, end, before), cohort in zip(states, cohorts, strict=True):
        sent = {
            **{name: end[name] for name in ("params", "buffers", "start")},
            "average": before["params"],
            "average_buffers": before["buffers"],
        }
        orders.append(Order(run, sent, cohort, ("diagnose",)))
    replies = engine.exchange(Exchange(PHASE, retain=retain), orders)
    return [
        _summary(reply.collected, end, before)
        for reply, (_, end, before) in zip(replies, states, strict=True)
    ]


def _summary(collected: Groups, end: Groups, before: Groups) -> dict[str, Any]:
    """Return the quantities of one run, from sums that are stacked over clients."""
    tally = {name: tensor.double().cpu() for name, tensor in collected["tally"].items()}
    each = {name: (tally[name] / tally["examples"]).tolist() for name in TALLIES[1:]}
    mean = {name: sum(values) / len(values) for name, values in each.items()}
    l1, l2, l2_average = mean["own_loss"], mean["divergence"], mean["average_divergence"]
    return {
        "L1": l1,
        "L2_average": l2_average,
        "L2": l2,
        "bound_average": l1 + l2_average,
        "bound": l1 + l2,
        "moved": _norm(combine(torch.sub, end["params"], before["params"])).item(),
        "update_norms": collected["norm"]["update"].double().cpu().tolist(),
        "client_loss": each["own_loss"],
        "client_accuracy": each["own_correct"],
        "global_loss": each["loss"],
        "global_accuracy": each["correct"],
    }


def _norm(tensors: Tensors) -> Tensor:
    squares = [tensor.double().square().sum() for tensor in tensors.values()]
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


# --- the client's half


def _start(model: Model, sent: Groups, memo: Groups) -> Groups:
    params, buffers = own_model(model, sent, memo)
    before = own_model(model, {"params": sent["average"], "buffers": sent["average_buffers"]}, memo)
    zero = torch.zeros((), dtype=torch.float64, device=next(iter(params.values())).device)
    return {
        "params": params,
        "buffers": buffers,
        "average": before[0],
        "average_buffers": before[1],
        "model": memo["model"],
        "tally": dict.fromkeys(TALLIES, zero),
    }


def _step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
    def outputs(params: Tensors, buffers: Tensors) -> Tensor:
        logits = model(params, buffers, batch.x, mode="eval", key=batch.key).logits
        return log_softmax(logits.double(), -1)

    trained = carry["model"]
    client = outputs(only(trained, model.param_names), only(trained, model.buffer_names))
    shared = outputs(carry["params"], carry["buffers"])
    average = outputs(carry["average"], carry["average_buffers"])
    present = (batch.share > 0).double()
    each = {
        "examples": present,
        "own_loss": cross_entropy(client, batch.y, reduction="none"),
        "own_correct": (client.argmax(-1) == batch.y).double(),
        "loss": cross_entropy(shared, batch.y, reduction="none"),
        "correct": (shared.argmax(-1) == batch.y).double(),
        "divergence": (client.exp() * (client - shared)).sum(-1),
        "average_divergence": (client.exp() * (client - average)).sum(-1),
    }
    tally = {name: carry["tally"][name] + (each[name] * present).sum() for name in TALLIES}
    return {**carry, "tally": tally}


def _finish(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
    trained = only(memo["model"], sent["start"])
    update = combine(lambda start, end: end - start, sent["start"], trained)
    return {"tally": carry["tally"], "norm": {"update": _norm(update)}}, memo


PHASE = Phase(
    name="diagnose",
    client=Fold(_start, _step, _finish),
    server=lambda model, state, collected, rates: state,
    reads=Reads(batch_size=1000, random=False),
    collect={"tally": Collect.EVERY, "norm": Collect.EVERY},
)
