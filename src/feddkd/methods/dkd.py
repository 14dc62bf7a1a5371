"""DKD, the distillation module of FedDKD: Li, Chen, Lu, "FedDKD: federated learning with
decentralized knowledge distillation", Applied Intelligence 53 (2023), arXiv:2205.00706; Algorithm 1
lines 7-11, Algorithm 2, and for batch norm Algorithms 4 and 5.

    J times:  w <- w - gamma 1/m sum_k g_k,   g_k = grad_w 1/B sum_x CE(softmax f(w_k; x), f(w; x)),  x from client k's own data

The teacher w_k is the client's own model as local training left it; it is never sent. Labels are
not used. Put it after any method that trains locally: fedavg() | dkd() is FedDKD, fedmax() | dkd()
FedDKD_MAX, fedbn() | dkd() FedDKD_BN (private tensors of a client then take their places in the
student and are not updated).

Departures from the paper, each a switch: another divergence or temperature, gradients weighed by
examples, momentum (anew in every round), several steps on the client's own copy of w in an exchange
(`local_steps`; the server then averages the copies), and `steps="auto"`: each client sets `spare`
examples aside for the round and sends the divergence on them along with its gradient; once their
mean no longer falls, the server goes back to the best weights so far (the plain average, if the
first step did not help) and ends the round. `limit` is the most steps it makes; the last of them
costs one more exchange, to be judged. It keeps what helps at once, which is not all that helps:
where DKD pays only in later rounds (docs/reproduction.md, table `emnist-auto`) little more than the
average is left.
"""

from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad

from feddkd.data.batches import Reads
from feddkd.errors import InputError
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
from feddkd.methods.losses import Divergence, distillation, reverse_distillation, squared_distance
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Mode, Model
from feddkd.spec.schedules import Rate, Repeat, Schedule
from feddkd.spec.types import Count, Momentum, Positive, Whole
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
    teacher: Literal["eval", "batch", "train"] = "eval",
    local_steps: Count = 1,
    limit: Count = 10,
    spare: Count = 64,
    gathering: Gathering,
) -> Method:
    """Clients teach the average by their own models: J times w <- w - gamma 1/m sum_k grad
    CE(softmax f(w_k), f(w)).
    """
    auto = steps == "auto"
    if local_steps > 1 and auto:
        raise InputError("dkd: several local_steps do not go with steps='auto'")
    if gathering != PLAINLY and auto:
        raise InputError(
            "dkd: clip, noise and gather do not go with steps='auto', whose probe is neither"
            " clipped nor noised"
        )
    if gathering.noise and weights == "examples":
        raise InputError(
            "dkd: noise does not go with weights='examples': what a client adds must not grow with"
            " its examples"
        )
    mean = Collect.MEAN_BY_CLIENTS if weights == "clients" else Collect.MEAN_BY_EXAMPLES
    targets, loss = _teach(teacher), _learn(student, _divergence(divergence, temperature))
    lesson = Gradient(targets, loss, probe_of(targets, loss) if auto else None)
    phase = Phase(
        name="distil",
        client=_on_own_copy(lesson) if local_steps > 1 or gathering != PLAINLY else lesson,
        server=partial(_cautious if auto else _descend, momentum),
        reads=Reads(batch_size, steps=local_steps, spare=spare if auto else 0),
        collect={"gradient": mean, "probe": mean} if auto else {"gradient": mean},
        rates={
            "lr": Rate(lr, lr_decay, lr_step_decay),
            **_marks(momentum, limit if auto else None),
        },
        repeat=Repeat(limit + 1 if auto else int(steps), warmup),
        over=_over if auto else None,
        refines=True,
        needs=frozenset({"model"}),
        opens=partial(_open, bool(momentum), auto),
    )
    return Method((gathered(phase, gathering),))


def _divergence(kind: str, temperature: float) -> Divergence:
    if kind == "squared":  # T^2 |a/T - b/T|^2 is the same for every T
        return squared_distance
    return partial(distillation if kind == "kl" else reverse_distillation, temperature=temperature)


# --- the client's half


def _teach(teacher: Mode) -> Targets:
    def targets(model: Model, memo: Groups, batch: Batch) -> Tensor:
        w_k = memo["model"]
        params, buffers = only(w_k, model.param_names), only(w_k, model.buffer_names)
        return model(params, buffers, batch.x, mode=teacher, key=batch.key).logits

    return targets


def _learn(student: Mode, divergence: Divergence) -> Loss:
    def loss(
        model: Model, w: Tensors, sent: Groups, memo: Groups, batch: Batch, taught: Tensor
    ) -> Tensor:
        params, buffers = own_model(model, {**sent, "params": w}, memo)
        return divergence(
            taught, model(params, buffers, batch.x, mode=student, key=batch.key).logits, batch
        )

    return loss


def _on_own_copy(lesson: Gradient) -> Fold:
    """Some steps of the same descent before anything is sent; what is sent is the way gone, as if
    by one gradient.
    """

    def start(model: Model, sent: Groups, memo: Groups) -> Groups:
        begun = {"params": sent["params"], "gradient": zeros(sent["params"])}
        return {**begun, "model": memo["model"], "private": memo.get("private", {})}

    def step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        taught = lesson.targets(model, carry, batch)
        gradient = grad(lambda w: lesson.loss(model, w, sent, carry, batch, taught))(
            carry["params"]
        )
        moved = add(carry["params"], gradient, -sent["rates"]["lr"])
        return {**carry, "params": moved, "gradient": add(carry["gradient"], gradient)}

    def finish(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
        return {"gradient": carry["gradient"]}, memo

    return Fold(start, step, finish)


# --- the server's half


def _marks(momentum: float, limit: int | None) -> dict[str, Schedule]:
    """What the server has to know of the repetition: whether it is the first, or one only to judge
    the last step.
    """
    later: dict[str, Schedule] = (
        {"later": lambda round, step: float(step > 1)} if momentum or limit else {}
    )
    return {**later, "last": lambda round, step: float(step > limit)} if limit else later


def _open(momentum: bool, auto: bool, model: Model, state: Groups, world: World) -> Groups:
    velocity = {"dkd_velocity": zeros(state["params"])} if momentum else {}
    if not auto:
        return velocity
    nothing = next(iter(state["params"].values())).new_zeros(())
    return {
        **velocity,
        "dkd_best": state["params"],
        "dkd_trial": {"loss": nothing, "over": nothing},
    }


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
    """What was probed is where the server stands now; it moves on only from the best place so far."""
    loss, lowest = collected["probe"]["loss"], state["dkd_trial"]["loss"]
    better = (loss < lowest) | (rates["later"] == 0)  # False where the loss is not a number
    best = combine(
        lambda here, before: torch.where(better, here, before), state["params"], state["dkd_best"]
    )
    moved = _descend(momentum, model, {**state, "params": best}, collected, rates)
    stay = ~better | (rates["last"] > 0)
    params = combine(lambda here, there: torch.where(stay, here, there), best, moved["params"])
    trial = {"loss": torch.where(better, loss, lowest), "over": stay.to(loss.dtype)}
    return {**moved, "params": params, "dkd_best": best, "dkd_trial": trial}


def _over(state: Groups) -> Tensor:
    return state["dkd_trial"]["over"] > 0
