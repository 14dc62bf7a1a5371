"""Schedules of a rate by name: the factors f_1, f_2, ... of its rounds or steps.

In the first `warmup` rounds, f_t = t / (warmup + 1). The schedule itself begins after them, at 1.
`over` counts all rounds with those of the warm-up; after `over` rounds the factor stays at `end`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from feddkd.errors import InputError
from feddkd.spec.registry import Registry, Spelled
from feddkd.spec.types import LATER, CallText, Count, NonNegative, Positive, Whole


@dataclass(frozen=True, eq=False)
class RateSchedule(Spelled):
    """The factors of a rate: `factor` maps t = 1, 2, ... as float64 to f_t."""

    factor: Callable[[Tensor], Tensor]

    def at(self, t: int) -> float:
        """Return f_t."""
        return self.factor(torch.tensor(t, dtype=torch.float64)).item()


SCHEDULES: Registry[RateSchedule] = Registry("schedule", "feddkd.schedules")
ScheduleText = Annotated[str | None, CallText("schedule", SCHEDULES.one), LATER]


def read_schedule(text: str | None) -> RateSchedule | None:
    """Return the schedule of an option, or None if there is none."""
    return None if text is None else SCHEDULES.one(text)


@SCHEDULES.register
def constant(*, warmup: Whole = 0) -> RateSchedule:
    """The factor 1."""
    return _after_warmup(warmup, torch.ones_like)


@SCHEDULES.register
def exponential(*, factor: Positive, warmup: Whole = 0) -> RateSchedule:
    """The factor `factor`^u after u rounds, as torch's ExponentialLR."""
    return _after_warmup(warmup, lambda u: factor**u)


@SCHEDULES.register
def step(*, every: Count, factor: Positive = 0.1, warmup: Whole = 0) -> RateSchedule:
    """Multiplied by `factor` after every `every` rounds, as torch's StepLR."""
    return _after_warmup(warmup, lambda u: factor ** torch.floor(u / every))


@SCHEDULES.register
def linear(*, over: Count, end: NonNegative = 0.0, warmup: Whole = 0) -> RateSchedule:
    """Straight from 1 to `end`, as torch's LinearLR."""
    length = _length(over, warmup)
    return _after_warmup(warmup, lambda u: 1 + (end - 1) * (u / length).clamp(max=1))


@SCHEDULES.register
def cosine(*, over: Count, end: NonNegative = 0.0, warmup: Whole = 0) -> RateSchedule:
    """Half a cosine from 1 to `end`, as torch's CosineAnnealingLR."""
    length = _length(over, warmup)

    def factor(u: Tensor) -> Tensor:
        return end + (1 - end) * (1 + torch.cos(math.pi * (u / length).clamp(max=1))) / 2

    return _after_warmup(warmup, factor)


def _length(over: int, warmup: int) -> int:
    """Return the number of rounds after the warm-up."""
    if warmup >= over:
        raise InputError(f"over={over} must be more than warmup={warmup}: it counts the warm-up")
    return over - warmup


def _after_warmup(warmup: int, curve: Callable[[Tensor], Tensor]) -> RateSchedule:
    """Return the schedule with a warm-up, then `curve` of the rounds after it: 0, 1, ..."""
    if not warmup:
        return RateSchedule(lambda t: curve(t - 1))

    def factor(t: Tensor) -> Tensor:
        after = curve((t - 1 - warmup).clamp(min=0))
        return torch.where(t <= warmup, t / (warmup + 1), after)

    return RateSchedule(factor)
