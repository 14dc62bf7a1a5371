"""FedDF: Lin, Kong, Stich, Jaggi, "Ensemble distillation for robust model fusion in federated
learning", NeurIPS 2020, arXiv:2006.07242.

    w <- sum_k n_k / (sum_i n_i) w_k,   then S times
    w <- optimiser(w, grad KL(softmax(1/m sum_k f(w_k; x) / T) || softmax(f(w; x) / T)))

x are public examples; their labels are not used. As in the published code, the student begins at
the average and is in train mode; the teachers are in eval mode, with their own batch-norm
statistics, and the target is the mean of their logits; Adam with cosine annealing over the S steps
starts again in every round; the gradient's norm is clipped at 5; there is no factor T^2.

Unlike the published code, the number of steps is fixed (1,000, the smallest number that the code
makes) and the last student is kept. The code evaluates the student on a validation set every 100
steps, stops after 1,000 steps without gain (at most 10,000) and keeps the best student.

The teachers' tensors are those that FedAvg uploads, so no more bytes are sent. `taught_at_server`
is used by every method whose server learns from public examples (feded.py).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.func import vmap

from feddkd.data.batches import Reads
from feddkd.errors import InputError
from feddkd.gradient import grad
from feddkd.method import Batch, Collect, Fold, Method, Phase, World
from feddkd.methods.local import Local, Variant, local_training, take_average
from feddkd.methods.losses import task_divergence, task_loss
from feddkd.methods.optimisers import OPTIMISERS, Optimiser, OptimiserName, clip_norm
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model, Output
from feddkd.spec.schedules import Rate
from feddkd.spec.types import Count, Positive
from feddkd.tensors import Groups, Tensors


@dataclass(frozen=True, kw_only=True)
class ServerTraining:
    """Options of training on public examples at the server."""

    server_steps: Count = 1000
    server_batch_size: Count = 128
    server_lr: Positive = 1e-3
    server_optimiser: OptimiserName = "adam"
    annealing: Literal["cosine", "none"] = "cosine"  # of server_lr, over the steps of a round
    clip: Positive | None = 5.0  # limit of the gradient's norm
    temperature: Positive = 1.0

    def build_optimiser(self) -> Optimiser:
        """Return the optimiser that the options describe."""
        return OPTIMISERS[self.server_optimiser]()

    def rate(self, lr: Tensor, step: Tensor) -> Tensor:
        """Return the rate lr (1 + cos(pi s / S)) / 2 at step s = 0, 1, ..., or lr."""
        done = step.to(lr.dtype) / self.server_steps
        return lr * (1 + torch.cos(math.pi * done)) / 2 if self.annealing == "cosine" else lr


@METHODS.register
def feddf(local: Local, training: ServerTraining) -> Method:
    """FedAvg, then distillation on public x: KL(softmax mean_k f(w_k; x) || softmax f(w; x))."""
    teachers = {"models": "params", "statistics": "buffers"}
    (train,) = local_training(local, Variant(every=teachers, server=_keep_teachers)).phases
    fuse = taught_at_server("fuse", training, _vote, teachers=tuple(teachers), refines=True)
    return Method((train, fuse))


def _keep_teachers(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
    """Take the average, and keep every client's model until the server has learnt from it."""
    averaged = take_average(model, state, collected, rates)
    return {**averaged, "models": collected["models"], "statistics": collected["statistics"]}


def _vote(model: Model, sent: Groups, step: Tensor, batch: Batch) -> Tensor:
    """Return the mean logits of the teachers, 1/m sum_k f(w_k; x)."""

    def logits(params: Tensors, buffers: Tensors) -> Tensor:
        return model(params, buffers, batch.x, mode="eval", key=batch.key).logits

    votes: Tensor = vmap(logits)(sent["models"], sent["statistics"])
    return votes.mean(0)


# (model, sent, step = 0, 1, ..., batch) -> logits to learn
Teach = Callable[[Model, Groups, Tensor, Batch], Tensor]


def taught_at_server(
    name: str,
    training: ServerTraining,
    teach: Teach,
    *,
    teachers: tuple[str, ...],
    hard: float = 0.0,
    random: bool = True,
    refines: bool,
) -> Phase:
    """Return a phase in which the server's model learns the logits of `teach` on public examples.

    `teachers` names the groups of the state that `teach` uses; they are deleted afterwards.

        loss = KL(softmax(taught / T) || softmax(f(w; x) / T)) + hard CE(f(w; x), y)
    """

    def server(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
        kept = {group: tensors for group, tensors in state.items() if group not in teachers}
        return {**kept, "params": collected["params"], "buffers": collected["buffers"]}

    def opens(model: Model, state: Groups, world: World) -> Groups:
        if {*state["params"], *state["buffers"]} != model.param_names | model.buffer_names:
            raise InputError(
                f"phase {name!r} needs whole models at the server; they do not go with tensors"
                " private to clients"
            )
        return {}

    batches = Reads(
        training.server_batch_size, steps=training.server_steps, source="public", random=random
    )
    return Phase(
        name=name,
        client=_student(training, teach, hard),
        server=server,
        reads=batches,
        # a mean over one upload, the server's own
        collect={"params": Collect.MEAN_BY_CLIENTS, "buffers": Collect.MEAN_BY_CLIENTS},
        sends=("params", "buffers", *teachers),
        rates={"lr": Rate(training.server_lr)},
        at="server",
        refines=refines,
        opens=opens,
        requires=task_divergence(training.temperature)[1],
    )


def _student(training: ServerTraining, teach: Teach, hard: float) -> Fold:
    """Return the steps of the server's model on the taught logits."""
    optimiser, (divergence, _) = training.build_optimiser(), task_divergence(training.temperature)

    def start(model: Model, sent: Groups, memo: Groups) -> Groups:
        zero = torch.zeros((), dtype=torch.int64, device=sent["rates"]["lr"].device)
        model_groups = {"params": sent["params"], "buffers": sent["buffers"]}
        return {**model_groups, "progress": {"step": zero}, **optimiser.init(sent["params"])}

    def step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        now = carry["progress"]["step"]
        taught = teach(model, sent, now, batch)
        temperature = training.temperature

        def loss(w: Tensors) -> tuple[Tensor, Output]:
            output = model(w, carry["buffers"], batch.x, mode="train", key=batch.key)
            soft = divergence(model, taught, output.logits, batch) / temperature**2
            return soft + hard * task_loss(model, output.logits, batch) if hard else soft, output

        gradient, output = grad(loss, has_aux=True)(carry["params"])
        if training.clip is not None:
            gradient = clip_norm(gradient, training.clip)
        lr = training.rate(sent["rates"]["lr"], now)
        params, moments = optimiser.update(carry["params"], gradient, carry, lr)
        after = {"params": params, "buffers": output.buffers, "progress": {"step": now + 1}}
        return {**carry, **after, **moments}

    def finish(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
        return {"params": carry["params"], "buffers": carry["buffers"]}, memo

    return Fold(start, step, finish)
