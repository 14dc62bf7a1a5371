"""Measures time, counts floating-point operations, and finds the peak of a matrix product."""

import copy
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from feddkd.bench.setting import BenchSetting

PATIENCE = 30.0  # seconds after which no further repeat starts
LENGTHS = (10, 100, 1000)  # rounds


class Timing(NamedTuple):
    """Seconds: the median and the range of the repeats, and the very first call.

    The first call also chooses, compiles and records.
    """

    median: float
    low: float
    high: float
    repeats: int
    first: float

    def per(self, units: int) -> "Timing":
        """Return the seconds per unit."""
        return Timing(
            self.median / units, self.low / units, self.high / units, self.repeats, self.first
        )


class Entrant(NamedTuple):
    """A function of round t to time, and one that runs before it and is not timed."""

    action: Callable[[int], object]
    before: Callable[[int], object] = lambda t: None


def timed(action: Callable[[int], object], device: torch.device, repeats: int) -> Timing:
    """Return the time of one function."""
    (timing,) = race(device, repeats, Entrant(action))
    return timing


def race(device: torch.device, repeats: int, *entrants: Entrant) -> list[Timing]:
    """Return the entrants' times for rounds t = 1, 2, ...

    The first round (on a GPU the first two) warms up and is not counted. The entrants take turns,
    so that other work on the machine slows them all alike.
    """
    warm = 2 if device.type == "cuda" else 1
    warming = [[_once(entrant, t, device) for t in range(1, warm + 1)] for entrant in entrants]
    times: list[list[float]] = []
    end = time.perf_counter() + PATIENCE
    while len(times) < repeats and (not times or time.perf_counter() < end):
        times.append([_once(entrant, warm + 1 + len(times), device) for entrant in entrants])
    by_entrant = zip(zip(*times, strict=True), warming, strict=True)
    return [
        Timing(statistics.median(seconds), min(seconds), max(seconds), len(seconds), warm_up[0])
        for seconds, warm_up in by_entrant
    ]


def growth(entrant: Entrant, device: torch.device) -> dict[int, float]:
    """Return the seconds of the first 10, 100 and 1,000 rounds, as many as PATIENCE allows."""
    total, ends = 0.0, {}
    for t in range(1, max(LENGTHS) + 1):
        total += _once(entrant, t, device)
        if t in LENGTHS:
            ends[t] = total
        if total > PATIENCE:
            break
    return ends


def _once(entrant: Entrant, t: int, device: torch.device) -> float:
    entrant.before(t)
    synchronise(device)
    began = time.perf_counter()
    entrant.action(t)
    synchronise(device)
    return time.perf_counter() - began


def synchronise(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def flops_an_example(net: nn.Module, example: Tensor) -> tuple[int, int]:
    """Return the operations for one example: (forward, forward and backward)."""
    count, net = 8, copy.deepcopy(net).to("meta").eval()
    x = example.expand(count, *example.shape).clone()
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        net(x)
    with FlopCounterMode(display=False) as both:
        net(x).sum().backward()
    return forward.get_total_flops() // count, both.get_total_flops() // count


def matmul_peak(setting: BenchSetting) -> float:
    """Return the operations per second of a large matrix product, in the setting's precision.

    It is the best of the repeats.
    """
    on_gpu = setting.device.type == "cuda"
    size, products = (8192, 10) if on_gpu else (1024, 3)
    dtype = torch.bfloat16 if setting.precision == "bf16" else setting.dtype
    a, b = (torch.rand(size, size, device=setting.device).to(dtype) for _ in range(2))

    def multiply(t: int) -> None:
        for _ in range(products):
            torch.mm(a, b)

    return 2 * size**3 * products / timed(multiply, setting.device, 5).low
