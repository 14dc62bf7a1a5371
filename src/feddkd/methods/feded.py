"""FedED: Sui, Chen, Zhao, Jia, Xie, Sun, "FedED: federated learning via ensemble distillation for
medical relation extraction", EMNLP 2020, doi:10.18653/v1/2020.emnlp-main.165.

    clients: w_k = local training from w_t; upload z_k = f(w_k; X), X the public examples
    server:  w_{t+1} = S steps from w_t on KL(softmax(1/m sum_k z_k(x) / T) || softmax(f(w; x) / T)) + hard CE(f(w; x), y)

Only predictions go up, whatever the size of the model; the server's own model goes down. From the
paper's abstract and a public re-implementation (the baseline in the code of FedID), which has T =
1, no labels (`hard=0`) and weights clients by examples; the paper's own weight of the public labels
and its optimiser we could not look up, so here are FedDF's and a switch. Clients weigh the same
here: 1/m. Local training and prediction are counted as two communications of a round, the second of
which sends nothing down. The server goes through the public examples in stored order and without
augmentation, as the predictions were made.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from feddkd.data.batches import Reads
from feddkd.method import Batch, Collect, Finish, Fold, Method, Phase, World
from feddkd.methods.feddf import ServerTraining, Teach, taught_at_server
from feddkd.methods.local import Local, local_training
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model
from feddkd.spec.types import NonNegative
from feddkd.tensors import Groups, only

AT_ONCE = 1000  # public examples that a client predicts in one step


@METHODS.register
def feded(local: Local, lesson: ServerTraining, *, hard: NonNegative = 0.0) -> Method:
    """Clients upload only z_k = f(w_k; public x); the server's model learns their mean: KL(softmax
    mean z_k || softmax f(w)).
    """
    (train,) = local_training(local).phases
    assert isinstance(train.client, Fold)
    silent = replace(train.client, finish=_without_upload(train.client.finish))
    at_home = replace(
        train, client=silent, collect={}, server=lambda model, state, collected, rates: state
    )
    learn = taught_at_server(
        "learn",
        lesson,
        _look_up(lesson.server_batch_size),
        teachers=("predictions",),
        hard=hard,
        random=False,
        refines=False,
    )
    return Method((at_home, _predict(), learn))


def _without_upload(finish: Finish) -> Finish:
    return lambda model, sent, carry, memo: ({}, finish(model, sent, carry, memo)[1])


def _predict() -> Phase:
    return Phase(
        name="predict",
        client=Fold(
            _start,
            _step,
            lambda model, sent, carry, memo: ({"predictions": carry["predictions"]}, memo),
        ),
        server=lambda model, state, collected, rates: {
            **state,
            "predictions": collected["predictions"],
        },
        reads=Reads(AT_ONCE, source="public", random=False),
        collect={"predictions": Collect.MEAN_BY_CLIENTS},
        sends=(),
        needs=frozenset({"model"}),
        keeps=frozenset({"blank"}),
        brings=_blank,
    )


def _blank(model: Model, state: Groups, world: World) -> Groups:
    """A table with a row for each public example, for clients to fill."""
    like = next(iter(state["params"].values()))
    return {"blank": {"logits": like.new_zeros(world.public, world.outputs)}}


def _start(model: Model, sent: Groups, memo: Groups) -> Groups:
    first = {"step": torch.zeros((), dtype=torch.int64, device=memo["blank"]["logits"].device)}
    return {"model": memo["model"], "predictions": memo["blank"], "lesson": first}


def _step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
    w_k, table, now = carry["model"], carry["predictions"]["logits"], carry["lesson"]["step"]
    logits = model(
        only(w_k, model.param_names),
        only(w_k, model.buffer_names),
        batch.x,
        mode="eval",
        key=batch.key,
    ).logits
    # of each row in this batch, if it is in it
    place = torch.arange(len(table), device=table.device) - now * AT_ONCE
    here = (place >= 0) & (place < len(logits))
    filled = torch.where(here[:, None], logits[place.clamp(0, len(logits) - 1)], table)
    return {**carry, "predictions": {"logits": filled}, "lesson": {"step": now + 1}}


def _look_up(batch_size: int) -> Teach:
    """The predictions for the batch of this step: batches come in stored order, epoch after epoch."""

    def teach(model: Model, sent: Groups, step: Tensor, batch: Batch) -> Tensor:
        table = sent["predictions"]["logits"]
        first = step % math.ceil(len(table) / batch_size) * batch_size
        rows = first + torch.arange(len(batch.y), device=table.device)
        return table[rows.clamp(max=len(table) - 1)]  # past the end is padding, without a share

    return teach
