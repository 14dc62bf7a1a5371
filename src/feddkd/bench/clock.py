"""Time, and what it is measured against:

floating-point operations and the peak of a large matrix product.
"""

import copy
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from feddkd.bench.setting import BenchSetting

PATIENCE = 30.0  # seconds of repeats after which no further one is begun


class Timing(NamedTuple):
    """Seconds: median and range of the repeats, and the first call of all, which chooses, compiles,
    records.
    """

    median: float
    low: float
    high: float
    repeats: int
    first: float

    def per(self, units: int) -> "Timing":
        return Timing(
            self.median / units, self.low / units, self.high / units, self.repeats, self.first
        )


class Entrant(NamedTuple):
    """What is timed in round t, and what goes ahead of it off the clock."""

    action: Callable[[int], object]
    before: Callable[[int], object] = lambda t: None


def timed(action: Callable[[int], object], device: torch.device, repeats: int) -> Timing:
    (timing,) = race(device, repeats, Entrant(action))
    return timing


def race(device: torch.device, repeats: int, *entrants: Entrant) -> list[Timing]:
    """The entrants' times for rounds t = 1, 2, ..., of which the first is for warming up, on a GPU
    the first two.

    They take turns, so that whatever else the machine does meets all of them alike.
    """
    warm = 2 if device.type == "cuda" else 1
    warming = [[_once(entrant, t, device) for t in range(1, warm + 1)] for entrant in entrants]
    times: list[list[float]] = []
    end = time.perf_counter() + PATIENCE
    while len(times) < repeats and (not times or time.perf_counter() < end):
        times.append([_once(entrant, warm + 1 + len(times), device) for entrant in entrants])
    return [
        Timing(statistics.median(own), min(own), max(own), len(own), first)
        for own, (first, *_) in zip(zip(*times, strict=True), warming, strict=True)
    ]


def _once(entrant: Entrant, t: int, device: torch.device) -> float:
    entrant.before(t)
    synchronise(device)
    began = time.perf_counter()
    entrant.action(t)
    synchronise(device)
    return time.perf_counter() - began


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def flops_an_example(net: nn.Module, shape: tuple[int, ...]) -> tuple[int, int]:
    """Floating-point operations for one example: (forward, forward and backward)."""
    count, net = 8, copy.deepcopy(net).to("meta").eval()
    x = torch.empty(count, *shape, device="meta")
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        net(x)
    with FlopCounterMode(display=False) as both:
        net(x).sum().backward()
    return forward.get_total_flops() // count, both.get_total_flops() // count


def matmul_peak(setting: BenchSetting) -> float:
    """Operations a second in a large product of random matrices, at its best, in the precision at
    hand.
    """
    on_gpu = setting.device.type == "cuda"
    size, products = (8192, 10) if on_gpu else (1024, 3)
    dtype = torch.bfloat16 if setting.precision == "bf16" else setting.dtype
    a, b = (torch.rand(size, size, device=setting.device).to(dtype) for _ in range(2))

    def multiply(t: int) -> None:
        for _ in range(products):
            torch.mm(a, b)

    return 2 * size**3 * products / timed(multiply, setting.device, 5).low
