"""FedDF: Lin, Kong, Stich, Jaggi, "Ensemble distillation for robust model fusion in federated
learning", NeurIPS 2020, arXiv:2006.07242.

    w <- sum_k n_k/n w_k, then S times  w <- optimiser(w, grad KL(softmax(1/m sum_k f(w_k; x) / T) || softmax(f(w; x) / T)))

x are public examples, their labels unused. As the published code has it: the student begins at the
average and is in train mode, teachers are in eval mode with statistics of their own and vote by the
mean of their logits; Adam with cosine annealing over the S steps, anew in every round; the
gradient's norm clipped at 5; no factor T^2. Not as there: the code judges the student on a
validation set every 100 steps, stops after 1,000 without gain and keeps the best; here a round's
steps are fixed (1,000, the fewest that the code ever makes, of at most 10,000) and the last student
is kept.

The teachers' tensors are what FedAvg uploads anyway, so nothing more travels. `taught_at_server`
serves every method whose server learns from public examples (feded.py).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad, vmap

from feddkd.data.batches import Reads
from feddkd.errors import InputError
from feddkd.method import Batch, Collect, Fold, Method, Phase, World
from feddkd.methods.local import Local, Variant, local_training, take_average
from feddkd.methods.losses import cross_entropy, distillation
from feddkd.methods.optimisers import Optimiser, adam, clip_norm, sgd
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model, Output
from feddkd.spec.schedules import Rate
from feddkd.spec.types import Count, Positive
from feddkd.tensors import Groups, Tensors


@dataclass(frozen=True, kw_only=True)
class ServerTraining:
    """How a server teaches its model on public examples."""

    server_steps: Count = 1000
    server_batch_size: Count = 128
    server_lr: Positive = 1e-3
    server_optimiser: Literal["adam", "sgd"] = "adam"
    annealing: Literal["cosine", "none"] = "cosine"  # of server_lr, over the steps of a round
    clip: Positive | None = 5.0  # the gradient's norm, at most
    temperature: Positive = 1.0

    def build_optimiser(self) -> Optimiser:
        return adam() if self.server_optimiser == "adam" else sgd()

    def rate(self, lr: Tensor, step: Tensor) -> Tensor:
        """lr (1 + cos(pi s / S)) / 2 at step s = 0, 1, ..."""
        done = step.to(lr.dtype) / self.server_steps
        return lr * (1 + torch.cos(math.pi * done)) / 2 if self.annealing == "cosine" else lr


@METHODS.register
def feddf(local: Local, lesson: ServerTraining) -> Method:
    """FedAvg, then the server distils the clients' models into it on public x: KL(softmax mean_k
    f(w_k) || softmax f(w)).
    """
    (phase,) = local_training(
        local, Variant(every={"models": "params", "statistics": "buffers"}, server=_keep_teachers)
    ).phases
    return Method(
        (
            phase,
            taught_at_server(
                "fuse", lesson, _vote, teachers=("models", "statistics"), refines=True
            ),
        )
    )


def _keep_teachers(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
    averaged = take_average(model, state, collected, rates)
    return {**averaged, "models": collected["models"], "statistics": collected["statistics"]}


def _vote(model: Model, sent: Groups, step: Tensor, batch: Batch) -> Tensor:
    """1/m sum_k f(w_k; x)"""

    def logits(params: Tensors, buffers: Tensors) -> Tensor:
        return model(params, buffers, batch.x, mode="eval", key=batch.key).logits

    votes: Tensor = vmap(logits)(sent["models"], sent["statistics"])
    return votes.mean(0)


# (model, sent, step = 0, 1, ..., batch) -> logits to be learnt
Teach = Callable[[Model, Groups, Tensor, Batch], Tensor]


def taught_at_server(
    name: str,
    lesson: ServerTraining,
    teach: Teach,
    *,
    teachers: tuple[str, ...],
    hard: float = 0.0,
    random: bool = True,
    refines: bool,
) -> Phase:
    """The server's model learns what `teach` makes of public examples and the groups `teachers`,
    which are then forgotten.

    loss = KL(softmax(taught / T) || softmax(f(w; x) / T)) + hard CE(f(w; x), y)
    """

    def server(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
        learnt = {"params": collected["params"], "buffers": collected["buffers"]}
        return {
            **{group: tensors for group, tensors in state.items() if group not in teachers},
            **learnt,
        }

    def opens(model: Model, state: Groups, world: World) -> Groups:
        if {*state["params"], *state["buffers"]} != model.param_names | model.buffer_names:
            raise InputError(
                f"phase {name!r} runs whole models at the server; they do not go with tensors"
                " private to clients"
            )
        return {}

    return Phase(
        name=name,
        client=_student(lesson, teach, hard),
        server=server,
        reads=Reads(
            lesson.server_batch_size, steps=lesson.server_steps, source="public", random=random
        ),
        # of one: the server itself
        collect={"params": Collect.MEAN_BY_CLIENTS, "buffers": Collect.MEAN_BY_CLIENTS},
        sends=("params", "buffers", *teachers),
        rates={"lr": Rate(lesson.server_lr)},
        at="server",
        refines=refines,
        opens=opens,
    )


def _student(lesson: ServerTraining, teach: Teach, hard: float) -> Fold:
    optimiser = lesson.build_optimiser()

    def start(model: Model, sent: Groups, memo: Groups) -> Groups:
        first = {"step": torch.zeros((), dtype=torch.int64, device=sent["rates"]["lr"].device)}
        return {
            "params": sent["params"],
            "buffers": sent["buffers"],
            "lesson": first,
            **optimiser.init(sent["params"]),
        }

    def step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        now = carry["lesson"]["step"]
        taught = teach(model, sent, now, batch)

        def loss(w: Tensors) -> tuple[Tensor, Output]:
            output = model(w, carry["buffers"], batch.x, mode="train", key=batch.key)
            soft = (
                distillation(taught, output.logits, batch, lesson.temperature)
                / lesson.temperature**2
            )
            return soft + hard * cross_entropy(output.logits, batch) if hard else soft, output

        gradient, output = grad(loss, has_aux=True)(carry["params"])
        gradient = gradient if lesson.clip is None else clip_norm(gradient, lesson.clip)
        params, after = optimiser.update(
            carry["params"], gradient, carry, lesson.rate(sent["rates"]["lr"], now)
        )
        return {
            **carry,
            "params": params,
            "buffers": output.buffers,
            "lesson": {"step": now + 1},
            **after,
        }

    def finish(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
        return {"params": carry["params"], "buffers": carry["buffers"]}, memo

    return Fold(start, step, finish)
