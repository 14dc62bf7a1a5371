"""FedED: Sui, Chen, Zhao, Jia, Xie, Sun, "FedED: federated learning via ensemble distillation for
medical relation extraction", EMNLP 2020, doi:10.18653/v1/2020.emnlp-main.165.

    clients: w_k = local training from w_t; upload z_k = f(w_k; X), X the public examples
    server:  w_{t+1} = S steps from w_t on
             KL(softmax(1/m sum_k z_k(x) / T) || softmax(f(w; x) / T)) + hard CE(f(w; x), y)

Clients upload only predictions, whatever the size of the model; the server sends down its own
model. The sources are the paper's abstract and a public re-implementation, the baseline in the code
of FedID, which has T = 1, no labels (`hard=0`) and weights by examples. We could not read the
paper's weight of the public labels and its optimiser: the first is the option `hard`, the second is
FedDF's. Here clients have equal weights 1/m. Local training and prediction count as two
communications of a round; the second sends nothing down. The server reads the public examples in
stored order and without augmentation, like the clients when they predicted.
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
from feddkd.tensors import Groups, Tensors, only

AT_ONCE = 1000  # public examples that a client predicts in one step


@METHODS.register
def feded(local: Local, training: ServerTraining, *, hard: NonNegative = 0.0) -> Method:
    """Clients upload predictions on public x: KL(softmax mean_k f(w_k; x) || softmax f(w; x))."""
    (train,) = local_training(local).phases
    assert isinstance(train.client, Fold)
    silent = replace(train.client, finish=_without_upload(train.client.finish))
    unsent = replace(
        train, client=silent, collect={}, server=lambda model, state, collected, rates: state
    )
    learn = taught_at_server(
        "learn",
        training,
        _look_up(training.server_batch_size),
        teachers=("predictions",),
        hard=hard,
        random=False,
        refines=False,
    )
    return Method((unsent, _predict(), learn))


def _without_upload(finish: Finish) -> Finish:
    """Return `finish` with an empty upload."""
    return lambda model, sent, carry, memo: ({}, finish(model, sent, carry, memo)[1])


def _predict() -> Phase:
    """Return the phase in which clients upload their predictions for the public examples."""
    return Phase(
        name="predict",
        client=Fold(_start, _step, _finish),
        server=_take_mean,
        reads=Reads(AT_ONCE, source="public", random=False),
        collect={"predictions": Collect.MEAN_BY_CLIENTS},
        sends=(),
        needs=frozenset({"model"}),
        keeps=frozenset({"blank"}),
        brings=_blank,
    )


def _blank(model: Model, state: Groups, world: World) -> Groups:
    """Return an empty table with the output for each public example."""
    like = next(iter(state["params"].values()))
    return {"blank": {"logits": like.new_zeros(world.public, *world.output)}}


def _start(model: Model, sent: Groups, memo: Groups) -> Groups:
    zero = torch.zeros((), dtype=torch.int64, device=memo["blank"]["logits"].device)
    return {"model": memo["model"], "predictions": memo["blank"], "progress": {"step": zero}}


def _step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
    """Write the logits of a batch into the table."""
    w_k, table, now = carry["model"], carry["predictions"]["logits"], carry["progress"]["step"]
    params, buffers = only(w_k, model.param_names), only(w_k, model.buffer_names)
    logits = model(params, buffers, batch.x, mode="eval", key=batch.key).logits
    # the position in this batch of each row of the table
    position = torch.arange(len(table), device=table.device) - now * AT_ONCE
    in_batch = (position >= 0) & (position < len(logits))
    in_batch = in_batch.reshape(-1, *(1,) * (logits.dim() - 1))
    filled = torch.where(in_batch, logits[position.clamp(0, len(logits) - 1)], table)
    return {**carry, "predictions": {"logits": filled}, "progress": {"step": now + 1}}


def _finish(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
    return {"predictions": carry["predictions"]}, memo


def _take_mean(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
    return {**state, "predictions": collected["predictions"]}


def _look_up(batch_size: int) -> Teach:
    """Return a function that looks up the mean predictions for the batch of a step.

    The batches are in stored order, epoch after epoch.
    """

    def teach(model: Model, sent: Groups, step: Tensor, batch: Batch) -> Tensor:
        table = sent["predictions"]["logits"]
        first = step % math.ceil(len(table) / batch_size) * batch_size
        rows = first + torch.arange(len(batch.share), device=table.device)
        return table[rows.clamp(max=len(table) - 1)]  # rows past the end are padding, of share 0

    return teach
