"""The quantities of the paper's theory, measured on the training examples of a round's clients when
the round has ended.

    L1' = 1/m sum_k E_{D_k} KL(y || f(w_k))        the clients' models against the labels
    L2' = 1/m sum_k E_{D_k} KL(f(w_k) || f(w))     the clients' models against the shared one, before DKD and after it

Proposition 1 bounds the squared total variation distance between labels and shared model by L1' +
L2'. Like evaluation this is an exchange, so nothing but sums leaves a client; it costs the clients
a pass over their data and is no part of a run's costs.
"""

from collections.abc import Mapping, Sequence
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
    """For each (run, state at the end, state before DKD) and the clients that took part: the
    quantities by name.

    Clients must still hold their models (memo group "model"); afterwards they keep what `retain`
    names.
    """
    orders = [
        Order(
            run,
            {
                **{name: end[name] for name in ("params", "buffers", "start")},
                "average": before["params"],
                "average_buffers": before["buffers"],
            },
            cohort,
            ("diagnose",),
        )
        for (run, end, before), cohort in zip(states, cohorts, strict=True)
    ]
    replies = engine.exchange(Exchange(PHASE, retain=retain), orders)
    return [
        _summary(reply.collected, end, before)
        for reply, (_, end, before) in zip(replies, states, strict=True)
    ]


def _summary(collected: Groups, end: Groups, before: Groups) -> dict[str, Any]:
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
    tally = dict.fromkeys(TALLIES, zero)
    return {
        "params": params,
        "buffers": buffers,
        "average": before[0],
        "average_buffers": before[1],
        "model": memo["model"],
        "tally": tally,
    }


def _step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
    def outputs(params: Tensors, buffers: Tensors) -> Tensor:
        return log_softmax(
            model(params, buffers, batch.x, mode="eval", key=batch.key).logits.double(), -1
        )

    own = outputs(only(carry["model"], model.param_names), only(carry["model"], model.buffer_names))
    shared, average = (
        outputs(carry["params"], carry["buffers"]),
        outputs(carry["average"], carry["average_buffers"]),
    )
    present = (batch.share > 0).double()
    found: Mapping[str, Tensor] = {
        "examples": present,
        "own_loss": cross_entropy(own, batch.y, reduction="none"),
        "own_correct": (own.argmax(-1) == batch.y).double(),
        "loss": cross_entropy(shared, batch.y, reduction="none"),
        "correct": (shared.argmax(-1) == batch.y).double(),
        "divergence": (own.exp() * (own - shared)).sum(-1),
        "average_divergence": (own.exp() * (own - average)).sum(-1),
    }
    tally = {name: carry["tally"][name] + (found[name] * present).sum() for name in TALLIES}
    return {**carry, "tally": tally}


def _finish(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
    update = combine(
        lambda start, trained: trained - start, sent["start"], only(memo["model"], sent["start"])
    )
    return {"tally": carry["tally"], "norm": {"update": _norm(update)}}, memo


PHASE = Phase(
    name="diagnose",
    client=Fold(_start, _step, _finish),
    server=lambda model, state, collected, rates: state,
    reads=Reads(batch_size=1000, random=False),
    collect={"tally": Collect.EVERY, "norm": Collect.EVERY},
)
