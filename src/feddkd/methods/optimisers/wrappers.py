"""Optimisers made from an optimiser: with bounded gradients, with a rate that changes by step."""

import torch
from torch import Tensor

from feddkd.methods.optimisers.optimiser import Optimiser
from feddkd.spec.rate_schedules import RateSchedule
from feddkd.tensors import Groups, Tensors, combine, norm


def clip_norm(grads: Tensors, most: float) -> dict[str, Tensor]:
    """Return g min(1, most / |g|) with |g| over all tensors, as torch.nn.utils.clip_grad_norm_."""
    scale = (most / (norm(grads) + 1e-6)).clamp(max=1.0)
    return combine(lambda gradient: gradient * scale, grads)


def clipped(optimiser: Optimiser, most: float) -> Optimiser:
    """Return the optimiser on gradients whose norm over all tensors is at most `most`."""

    def update(
        params: Tensors, grads: Tensors, state: Groups, lr: Tensor
    ) -> tuple[Tensors, Groups]:
        return optimiser.update(params, clip_norm(grads, most), state, lr)

    return Optimiser(optimiser.init, update)


def scheduled(optimiser: Optimiser, schedule: RateSchedule) -> Optimiser:
    """Return the optimiser at the rates lr f_1, lr f_2, ... in its first, second, ... step."""

    def init(params: Tensors) -> Groups:
        device = next(iter(params.values())).device
        step = {"step": torch.zeros((), dtype=torch.float64, device=device)}
        return {**optimiser.init(params), "schedule": step}

    def update(
        params: Tensors, grads: Tensors, state: Groups, lr: Tensor
    ) -> tuple[Tensors, Groups]:
        factor = factor_of_step(schedule, state).to(lr.dtype)
        moved, after = optimiser.update(params, grads, state, lr * factor)
        return moved, {**after, "schedule": {"step": state["schedule"]["step"] + 1}}

    return Optimiser(init, update)


def factor_of_step(schedule: RateSchedule, state: Groups) -> Tensor:
    """Return the factor of the next step of a scheduled optimiser, in float64."""
    return schedule.factor(state["schedule"]["step"] + 1)
