"""Local training, the exchange that most methods share (Algorithm 1, Client-LocalTrain).

    w_k: from w_t,  w <- optimiser(w, grad[ l(f(w; x), y) + terms ])  over client k's mini-batches
    w_{t+1} = sum_k n_k / (sum_i n_i) w_k

l is the loss of the task, by default cross-entropy; a method adds its terms to it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from feddkd.data.batches import Reads, Source
from feddkd.errors import InputError
from feddkd.gradient import grad
from feddkd.method import (
    Batch,
    Collect,
    Fact,
    Fold,
    Method,
    Phase,
    Private,
    ServerFn,
    World,
    own_model,
    uploads,
)
from feddkd.methods.aggregation import PLAINLY, Gathering, gathered
from feddkd.methods.losses import Term, task_loss
from feddkd.methods.optimisers import (
    Optimiser,
    OptimiserName,
    clipped,
    factor_of_step,
    optimiser_from,
    scheduled,
)
from feddkd.models.functional import Model, Output
from feddkd.spec.rate_schedules import RateSchedule, ScheduleText, read_schedule
from feddkd.spec.schedules import Rate, Schedule
from feddkd.spec.types import LATER, Count, Momentum, NonNegative, Positive
from feddkd.tasks.task import Offer
from feddkd.tensors import Groups, Tensors


@dataclass(frozen=True, kw_only=True)
class Local:
    """Options of local training, which every method with local training takes."""

    epochs: Count = 5
    steps: Count | None = None  # number of mini-batches, in place of epochs
    batch_size: Count = 64
    lr: Positive = 0.1
    lr_decay: Positive = 1.0  # per round
    optimiser: OptimiserName = "sgd"
    momentum: Momentum = 0.0
    nesterov: bool = False
    weight_decay: NonNegative = 0.0
    beta1: Momentum = 0.9
    beta2: Momentum = 0.999
    eps: Positive = 1e-8
    amsgrad: bool = False
    drop_last: bool = False
    lr_schedule: ScheduleText = None  # factors of lr, by round
    lr_step_schedule: ScheduleText = None  # factors of lr, by step of a client in a round
    # limit of a gradient's norm before each step; `clip` is that of a whole upload
    max_gradient_norm: Annotated[Positive | None, LATER] = None

    @property
    def rate(self) -> Rate:
        """Return the learning rate by round."""
        return Rate(self.lr, self.lr_decay, rounds=read_schedule(self.lr_schedule))

    @property
    def step_schedule(self) -> RateSchedule | None:
        """Return the factors of the learning rate by step."""
        return read_schedule(self.lr_step_schedule)

    def build_optimiser(self) -> Optimiser:
        """Return the optimiser that the options describe."""
        # in version 0.1, sgd and adam ignored each other's options: its texts remain valid
        unset = self if self.optimiser in ("sgd", "adam") else Local()
        optimiser = optimiser_from(self.optimiser, vars(self), vars(unset))
        if self.max_gradient_norm is not None:
            optimiser = clipped(optimiser, self.max_gradient_norm)
        schedule = self.step_schedule
        return optimiser if schedule is None else scheduled(optimiser, schedule)


Begin = Callable[[Model, Groups, Groups], Groups]  # (model, sent, memo) -> groups
# w -> gradient of the loss at w on the step's batch, and the network's output there
Slope = Callable[[Tensors], tuple[Tensors, Output]]
# (slope, sent, carry) -> gradient, output, new values of groups of `begin`
Take = Callable[[Slope, Groups, Groups], tuple[Tensors, Output, Groups]]
# (logits, carry) -> logits that the loss of the task sees
Calibrate = Callable[[Tensor, Groups], Tensor]
Bend = Callable[[Tensors, Groups, Groups], Tensors]  # (gradient, sent, carry) -> direction
# (model, sent, carry, output, batch) -> groups
Watch = Callable[[Model, Groups, Groups, Output, Batch], Groups]
# (model, carry) -> name -> True where the step does not change a tensor; names that are not there
# are moved
Holds = Callable[[Model, Groups], Mapping[str, Tensor]]
# (model, sent, carry, memo) -> (upload, memo)
Part = Callable[[Model, Groups, Groups, Groups], tuple[Groups, Groups]]


def at_present_weights(slope: Slope, sent: Groups, carry: Groups) -> tuple[Tensors, Output, Groups]:
    """Return the gradient at the weights of the carry, and the output there."""
    return *slope(carry["params"]), {}


@dataclass(frozen=True)
class Variant:
    """Changes of a method to FedAvg's exchange; the defaults are FedAvg.

    Groups named here are in addition to params and buffers. Fields with the name of a field of
    `Phase` are passed to the phase.
    """

    terms: tuple[Term, ...] = ()  # added to the loss
    # changes the logits for the loss; terms see the network's own
    calibrate: Calibrate = lambda logits, carry: logits
    # makes groups of the carry: constants, counters, trackers
    begin: Begin = lambda model, sent, memo: {}
    # says where the gradient is taken; the network's buffers change as in the output it returns
    take: Take = at_present_weights
    # makes the direction that the optimiser takes in place of the gradient
    bend: Bend = lambda gradient, sent, carry: gradient
    # names the tensors that a step does not change, and the optimiser's state of them
    holds: Holds = lambda model, carry: {}
    # makes the new values of the groups of `begin` after a step
    watch: Watch = lambda model, sent, carry, output, batch: {}
    # makes the groups to upload and the groups to keep, after the last step
    part: Part = lambda model, sent, carry, memo: ({}, {})
    server: ServerFn | None = None  # replaces take_average
    collect: Mapping[str, Collect] = field(default_factory=dict)
    every: Mapping[str, str] = field(default_factory=dict)
    sends: tuple[str, ...] = ()
    rates: Mapping[str, Schedule] = field(default_factory=dict)
    keeps: frozenset[str] = frozenset()
    opens: Callable[[Model, Groups, World], Groups] | None = None
    brings: Callable[[Model, Groups, World], Groups] | None = None
    private: Private = "none"
    source: Source = "train"
    facts: frozenset[Fact] = frozenset()
    requires: frozenset[Offer] = frozenset()  # what the terms need of the task


FEDAVG = Variant()


def local_training(
    local: Local, variant: Variant = FEDAVG, gathering: Gathering = PLAINLY
) -> Method:
    """Return a method of one exchange: clients train on labels, and the server averages.

    The trained model stays with the client as memo["model"], since a later phase may use it as a
    teacher. `gathering` is only for variants that upload nothing but their models.
    """
    batches = Reads(
        local.batch_size,
        local.epochs,
        local.steps,
        source=variant.source,
        drop_last=local.drop_last,
    )
    phase = Phase(
        name="local",
        client=_client(local.build_optimiser(), variant),
        server=variant.server or take_average,
        reads=batches,
        facts=variant.facts,
        collect={
            "params": Collect.MEAN_BY_EXAMPLES,
            "buffers": Collect.MEAN_BY_EXAMPLES,
            **variant.collect,
        },
        every=variant.every,
        sends=("params", "buffers", *variant.sends),
        rates={"lr": local.rate, **variant.rates},
        leaves=frozenset({"model"}),
        keeps=variant.keeps,
        opens=variant.opens,
        brings=variant.brings,
        requires=variant.requires,
    )
    return Method((gathered(phase, gathering),), frozenset({variant.private}))


def take_average(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
    """Return the state with the average wbar = sum_k n_k / (sum_i n_i) w_k as the shared model."""
    return {**state, "params": collected["params"], "buffers": collected["buffers"]}


def _client(optimiser: Optimiser, variant: Variant) -> Fold:
    """Return the client half: steps of an optimiser on the task's loss and the variant's terms."""

    def start(model: Model, sent: Groups, memo: Groups) -> Groups:
        params, buffers = own_model(model, sent, memo)
        return {
            "params": params,
            "buffers": buffers,
            **optimiser.init(params),
            **variant.begin(model, sent, memo),
        }

    def step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        def loss(w: Tensors) -> tuple[Tensor, Output]:
            output = model(w, carry["buffers"], batch.x, mode="train", key=batch.key)
            value = task_loss(model, variant.calibrate(output.logits, carry), batch)
            for term in variant.terms:
                value = value + term(model, w, sent, carry, output, batch)
            return value, output

        gradient, output, taken = variant.take(grad(loss, has_aux=True), sent, carry)
        direction = variant.bend(gradient, sent, carry)
        params, state = optimiser.update(carry["params"], direction, carry, sent["rates"]["lr"])
        moved = held(variant.holds(model, carry), carry, {"params": params, **state})
        watched = variant.watch(model, sent, carry, output, batch)
        return {**carry, "buffers": output.buffers, **moved, **taken, **watched}

    def finish(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
        upload, after = uploads(model, carry["params"], carry["buffers"], memo)
        more, kept = variant.part(model, sent, carry, memo)
        trained = {**carry["params"], **carry["buffers"]}
        return {**upload, **more}, {**after, "model": trained, **kept}

    return Fold(start, step, finish)


# --- pieces that several variants share


def held(holds: Tensors, before: Groups, after: Groups) -> Groups:
    """Return the groups `after` a step with the held tensors of `before`."""
    return {
        group: {
            name: torch.where(holds[name], before[group][name], new) if name in holds else new
            for name, new in tensors.items()
        }
        for group, tensors in after.items()
    }


def counted(begin: Begin) -> tuple[Begin, Watch]:
    """Return `begin` and `watch` that also count the steps so far in carry["progress"]["step"]."""

    def begin_both(model: Model, sent: Groups, memo: Groups) -> Groups:
        zero = torch.zeros((), dtype=torch.int64, device=sent["rates"]["lr"].device)
        return {**begin(model, sent, memo), "progress": {"step": zero}}

    def watch(model: Model, sent: Groups, carry: Groups, output: Output, batch: Batch) -> Groups:
        return {"progress": {"step": carry["progress"]["step"] + 1}}

    return begin_both, watch


def hold_private(model: Model, sent: Groups, memo: Groups) -> Groups:
    """Return the private tensors at the start, for a carry: a `begin` for some terms.

    With them own_model(model, sent, carry) is, at every step, the model before the first step.
    """
    return {"private": memo.get("private", {})}


def reach(local: Local, method: str) -> tuple[Begin, Watch]:
    """Return `begin` and `watch` that compute carry["reach"]["a"], the length of the steps so far.

    It is the sum of the weights that a client's gradients have in its move, in units of the
    learning rate of the round: K after K steps of plain SGD, (K - rho (1 - rho^K) / (1 - rho)) /
    (1 - rho) with momentum rho, and the exact value for Nesterov's momentum and for a rate that
    changes by step.
    """
    if local.optimiser != "sgd":
        raise InputError(
            f"{method} weighs the steps of SGD; optimiser={local.optimiser!r} does not go with it"
        )

    schedule = local.step_schedule

    def begin(model: Model, sent: Groups, memo: Groups) -> Groups:
        zero = sent["rates"]["lr"].new_zeros(())
        return {"reach": {"a": zero, "v": zero}}

    def watch(model: Model, sent: Groups, carry: Groups, output: Output, batch: Batch) -> Groups:
        v = local.momentum * carry["reach"]["v"] + 1
        length = 1 + local.momentum * v if local.nesterov else v
        if schedule is not None:
            length = length * factor_of_step(schedule, carry).to(length.dtype)
        return {"reach": {"a": carry["reach"]["a"] + length, "v": v}}

    return begin, watch
