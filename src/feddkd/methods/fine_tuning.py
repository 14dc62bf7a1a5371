"""Fine-tuning before evaluation: Collins, Hassani, Mokhtari, Shakkottai, "FedAvg with fine tuning:
local updates lead to representation learning", NeurIPS 2022, arXiv:2205.13692.

    v_k = local training from the shared model,   client k is judged by v_k

A piece to put after any method with a shared model: fedavg() | fine_tune(epochs=1) is FedAvg with
fine-tuning. Before each evaluation every client trains the model that it would be judged by;
nothing of it goes back into the rounds, so the shared model is the same as without the piece. The
steps are part of the evaluation: they are not among a run's communications, bytes and local steps.
`evaluation="global"` judges the shared model and does no fine-tuning.

`part` says what is trained: the whole model, the head alone, or the body alone. `names` lists the
tensors of the head as patterns; by default it is the last linear layer. A client starts from the
shared model with its private tensors in place, and its optimiser restarts each time.
"""

from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from feddkd.method import Finish, Fold, Method, Phase
from feddkd.methods.local import Holds, Local, Variant, local_training
from feddkd.methods.private import head_of
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model
from feddkd.spec.types import Names
from feddkd.tensors import Groups

Moved = Literal["all", "head", "body"]


@METHODS.register
def fine_tune(local: Local, *, part: Moved = "all", names: Names | None = None) -> Method:
    """The method before it; each client is judged after local training of the shared model."""
    return Method((tuning(local, part, names),))


def tuning(local: Local, part: Moved = "all", names: str | None = None) -> Phase:
    """Return the phase in which every client makes the model that it is judged by."""
    (train,) = local_training(local, Variant(holds=holding(part, names))).phases
    assert isinstance(train.client, Fold)
    return replace(
        train,
        name="fine-tune",
        client=replace(train.client, finish=partial(_keep, train.client.finish)),
        server=lambda model, state, collected, rates: state,
        collect={},
        at="judging",
        leaves=frozenset(),
        keeps=frozenset({"personal"}),
    )


def holding(part: Moved, names: str | None) -> Holds:
    """Return a function that says which tensors are not trained where only a part is."""
    if part == "all":
        return lambda model, carry: {}

    def holds(model: Model, carry: Groups) -> dict[str, Tensor]:
        head, params = head_of(model, names), carry["params"]
        true = torch.ones((), dtype=torch.bool, device=next(iter(params.values())).device)
        return {name: true for name in params if (name in head) != (part == "head")}

    return holds


def _keep(
    finish: Finish, model: Model, sent: Groups, carry: Groups, memo: Groups
) -> tuple[Groups, Groups]:
    """Return an empty upload, and the memo with the tuned model as the personal one."""
    _, after = finish(model, sent, carry, memo)
    return {}, {**memo, "personal": after["model"]}
