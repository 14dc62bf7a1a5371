"""DKD, the distillation module of FedDKD: Li, Chen, Lu, "FedDKD: federated learning with
decentralized knowledge distillation", Applied Intelligence 53 (2023), arXiv:2205.00706; Algorithm 1
lines 7-11, Algorithm 2, and for batch norm Algorithms 4 and 5.

    J times:  w <- w - gamma 1/m sum_k g_k
    g_k = grad_w 1/B sum_x CE(softmax f(w_k; x), f(w; x)),   x from client k's own data

The teacher w_k is the client's own model after local training; it is never sent. Labels are not
used. Put it after any method that trains locally: fedavg() | dkd() is FedDKD, fedmax() | dkd() is
FedDKD_MAX, fedbn() | dkd() is FedDKD_BN. (A client's private tensors then replace those of the
student and are not updated.)

Departures from the paper, each with its option:

`divergence`, `temperature`: another divergence or temperature, for logits of classes. For a task
without classes the divergence is that of the task. `weights`: gradients weighted by
examples. `momentum`: it starts from zero in every round. `local_steps`: several steps in one
exchange on the client's own copy of w; the server averages the copies.

`teacher`: "eval", "batch" and "train" are the mode in which w_k computes. "labels", "shuffled" and
"average" put something else in its place: controls, described in methods/teachers.py.

`steps="auto"`: each client sets `spare` examples aside for the round and sends the divergence on
them with its gradient. When the mean of these divergences no longer falls, the server returns to
the best weights so far (the plain average, if the first step did not help) and ends the round.
`limit` is the maximal number of steps; the last step needs one more exchange for its evaluation.
This keeps only steps with an immediate gain. Where DKD gains only in later rounds
(docs/reproduction.md, table `emnist-auto`), the result is little more than the average.
"""

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from feddkd.data.batches import Reads
from feddkd.errors import InputError
from feddkd.gradient import grad
from feddkd.method import (
    Batch,
    Collect,
    Fold,
    Gradient,
    Loss,
    Method,
    Phase,
    Targets,
    World,
    own_model,
    probe_of,
)
from feddkd.methods.aggregation import PLAINLY, Gathering, gathered
from feddkd.methods.losses import (
    CLASSES,
    TeachingLoss,
    of_classes,
    reverse_distillation,
    squared_distance,
    task_divergence,
    task_loss,
)
from feddkd.methods.registry import METHODS
from feddkd.methods.teachers import Teacher, bring_teachers, teacher_group, teacher_mode
from feddkd.models.functional import Mode, Model
from feddkd.spec.rate_schedules import ScheduleText, read_schedule
from feddkd.spec.schedules import Rate, Repeat, Schedule
from feddkd.spec.types import Count, Momentum, Positive, Whole
from feddkd.tasks.task import Offer
from feddkd.tensors import Groups, Tensors, add, add_at_once, combine, only, zeros


@METHODS.register
def dkd(
    *,
    steps: Count | Literal["auto"] = 10,
    batch_size: Count = 64,
    lr: Positive = 0.2,
    lr_decay: Positive = 1.0,
    lr_step_decay: Positive = 1.0,
    warmup: Whole = 0,
    momentum: Momentum = 0.0,
    weights: Literal["clients", "examples"] = "clients",
    divergence: Literal["kl", "reverse_kl", "squared"] = "kl",
    temperature: Positive = 1.0,
    student: Literal["eval", "batch", "train"] = "eval",
    teacher: Teacher = "eval",
    local_steps: Count = 1,
    limit: Count = 10,
    spare: Count = 64,
    lr_schedule: ScheduleText = None,
    lr_step_schedule: ScheduleText = None,
    gathering: Gathering,
) -> Method:
    """Clients teach the average: J times w <- w - gamma 1/m sum_k grad CE(softmax f(w_k), f(w))."""
    auto = steps == "auto"
    if local_steps > 1 and auto:
        raise InputError("dkd: local_steps > 1 and steps='auto' do not go together")
    if gathering != PLAINLY and auto:
        raise InputError(
            "dkd: clip, noise and gather do not go with steps='auto': its probe is neither clipped"
            " nor noised"
        )
    if gathering.noise and weights == "examples":
        raise InputError(
            "dkd: noise does not go with weights='examples': a client's part of the mean must not"
            " grow with the number of its examples"
        )
    if teacher == "labels" and (divergence, temperature) != ("kl", 1.0):
        raise InputError(
            "dkd: teacher='labels' takes the cross-entropy of the labels; divergence and"
            " temperature do not go with it"
        )
    mean = Collect.MEAN_BY_CLIENTS if weights == "clients" else Collect.MEAN_BY_EXAMPLES
    group = teacher_group(teacher)
    targets = _teach(group, teacher_mode(teacher)) if group else _no_targets
    diverge, requires = _divergence(divergence, temperature) if group else (_labels, frozenset())
    loss = _learn(student, diverge)
    needs = frozenset({group} if group else ())
    gradient = Gradient(targets, loss, probe_of(targets, loss) if auto else None)
    rounds, repetitions = read_schedule(lr_schedule), read_schedule(lr_step_schedule)
    rate = Rate(lr, lr_decay, lr_step_decay, rounds=rounds, steps=repetitions)
    phase = Phase(
        name="distil",
        client=_on_own_copy(gradient, needs)
        if local_steps > 1 or gathering != PLAINLY
        else gradient,
        server=partial(_cautious if auto else _descend, momentum),
        reads=Reads(batch_size, steps=local_steps, spare=spare if auto else 0),
        collect={"gradient": mean, "probe": mean} if auto else {"gradient": mean},
        rates={"lr": rate, **_marks(momentum, limit if auto else None)},
        repeat=Repeat(limit + 1 if auto else int(steps), warmup),
        over=_over if auto else None,
        refines=True,
        needs=needs,
        opens=partial(_open, bool(momentum), auto),
        requires=requires,
    )
    return Method((*bring_teachers(teacher, warmup), gathered(phase, gathering)))


def _divergence(kind: str, temperature: float) -> tuple[TeachingLoss, frozenset[Offer]]:
    """Return the divergence, and what it needs of the task: "kl" stands for that of any task."""
    if kind == "kl":
        return task_divergence(temperature)
    if kind == "squared":  # T^2 |a/T - b/T|^2 is the same for every T
        return of_classes(squared_distance), CLASSES
    return of_classes(partial(reverse_distillation, temperature=temperature)), CLASSES


# --- the client's half


def _teach(group: str, teacher: Mode) -> Targets:
    """Return a function that computes the teacher's logits f(w_k; x), w_k = memo[group]."""

    def targets(model: Model, memo: Groups, batch: Batch) -> Tensor:
        w_k = memo[group]
        params, buffers = only(w_k, model.param_names), only(w_k, model.buffer_names)
        return model(params, buffers, batch.x, mode=teacher, key=batch.key).logits

    return targets


def _no_targets(model: Model, memo: Groups, batch: Batch) -> Tensor:
    return batch.share.new_zeros(())


def _labels(model: Model, taught: Tensor, student: Tensor, batch: Batch) -> Tensor:
    return task_loss(model, student, batch)


def _learn(student: Mode, divergence: TeachingLoss) -> Loss:
    """Return the divergence of the student at w from the teacher's output."""

    def loss(
        model: Model, w: Tensors, sent: Groups, memo: Groups, batch: Batch, taught: Tensor
    ) -> Tensor:
        params, buffers = own_model(model, {**sent, "params": w}, memo)
        output = model(params, buffers, batch.x, mode=student, key=batch.key)
        return divergence(model, taught, output.logits, batch)

    return loss


def _on_own_copy(gradient: Gradient, needs: frozenset[str]) -> Fold:
    """Return a client that makes several descent steps on its own copy of w.

    It uploads the sum of the gradients, which stands for one gradient.
    """

    def start(model: Model, sent: Groups, memo: Groups) -> Groups:
        initial = {"params": sent["params"], "gradient": zeros(sent["params"])}
        teacher = {group: memo[group] for group in needs}
        return {**initial, **teacher, "private": memo.get("private", {})}

    def step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        taught = gradient.targets(model, carry, batch)

        def loss(w: Tensors) -> Tensor:
            return gradient.loss(model, w, sent, carry, batch, taught)

        g = grad(loss)(carry["params"])
        moved = add(carry["params"], g, -sent["rates"]["lr"])
        return {**carry, "params": moved, "gradient": add(carry["gradient"], g)}

    def finish(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
        return {"gradient": carry["gradient"]}, memo

    return Fold(start, step, finish)


# --- the server's half


def _marks(momentum: float, limit: int | None) -> dict[str, Schedule]:
    """Return rates that tell the server which repetition this is.

    "later" is 0 in the first repetition, else 1. "last" is 1 in the repetition after `limit`, which
    only evaluates the last step.
    """
    marks: dict[str, Schedule] = {}
    if momentum or limit:
        marks["later"] = lambda round, step: float(step > 1)
    if limit:
        marks["last"] = lambda round, step: float(step > limit)
    return marks


def _open(momentum: bool, auto: bool, model: Model, state: Groups, world: World) -> Groups:
    velocity = {"dkd_velocity": zeros(state["params"])} if momentum else {}
    if not auto:
        return velocity
    zero = next(iter(state["params"].values())).new_zeros(())
    trial = {"loss": zero, "over": zero}
    return {**velocity, "dkd_best": state["params"], "dkd_trial": trial}


def _descend(
    momentum: float, model: Model, state: Groups, collected: Groups, rates: Tensors
) -> Groups:
    direction = collected["gradient"]
    if momentum:
        direction = add_at_once(direction, state["dkd_velocity"], momentum * rates["later"])
        state = {**state, "dkd_velocity": direction}
    return {**state, "params": add_at_once(state["params"], direction, -rates["lr"])}


def _cautious(
    momentum: float, model: Model, state: Groups, collected: Groups, rates: Tensors
) -> Groups:
    """Make a step from the present weights if the probe found them better than all before.

    Otherwise return to the best weights and end the round.
    """
    loss, lowest = collected["probe"]["loss"], state["dkd_trial"]["loss"]
    better = (loss < lowest) | (rates["later"] == 0)  # False where the loss is not a number
    best = combine(
        lambda now, before: torch.where(better, now, before), state["params"], state["dkd_best"]
    )
    moved = _descend(momentum, model, {**state, "params": best}, collected, rates)
    stay = ~better | (rates["last"] > 0)
    params = combine(lambda old, new: torch.where(stay, old, new), best, moved["params"])
    trial = {"loss": torch.where(better, loss, lowest), "over": stay.to(loss.dtype)}
    return {**moved, "params": params, "dkd_best": best, "dkd_trial": trial}


def _over(state: Groups) -> Tensor:
    return state["dkd_trial"]["over"] > 0
