"""The number of lanes that are computed at once.

It is planned from the memory that a lane takes and the free memory, before the first lane starts.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from feddkd.engines.batched.folds import Work, run_loop, run_vmap
from feddkd.engines.memory import free_memory, in_words
from feddkd.tensors import Groups, bytes_of

log = logging.getLogger(__name__)
# The usable part of the free memory: the rest is for strategies that need more than the plain step,
# and for other programs.
USABLE = 0.7
# Copies of a lane's carry besides the step: at the start, in a recording, as upload and as memo.
COPIES = 4
TRIAL_LANES = 4
Start = Callable[[int], tuple[Work, Groups]]  # number of lanes -> (their work, their carry)


class Planner:
    """Lanes at once for each kind of work; `limit` in bytes replaces the free memory."""

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        self.device, self.limit = device, limit
        self.plans: dict[str, str] = {}  # kind of work -> the plan in words
        self._costs: dict[object, float] = {}
        self.most: dict[str, int] = {}  # kind of work -> lanes at once

    def lanes(self, kind: str, count: int, start: Start, trains: bool) -> int:
        """Return the lanes at once, in chunks of nearly equal size.

        `start` begins the work of the first lanes.
        """
        key = f"{kind}: {count} lanes"
        if key not in self.most:
            free = self.limit if self.limit is not None else free_memory(self.device)
            cost = self._cost(count, free, start)
            most = count if free is None else max(1, min(count, int(USABLE * free / cost)))
            self.most[key] = most
            level = logging.INFO if trains or most < count else logging.DEBUG
            self._log_plan(key, count, cost, free, level)
        return evenly(count, self.most[key])

    def halve(self, kind: str, count: int, lanes: int) -> int:
        """Return half of the lanes, after memory ran out in spite of the plan."""
        key, most = f"{kind}: {count} lanes", (lanes + 1) // 2
        self.most[key] = most
        self.plans[key] = f"{key} in chunks of {most} ({lanes} did not fit)"
        log.warning(
            "%s: %d lanes do not fit in memory; continuing with %d at once", kind, lanes, most
        )
        return most

    def _cost(self, count: int, free: int | None, start: Start) -> float:
        """Return the bytes that a lane takes.

        The sum of all that a step allocates is an upper bound. Only if the lanes would not fit by
        this bound, a step is tried on a GPU.
        """
        work, carry = start(1)
        key = work.client, work.table.indices.shape[2], work.dtype
        if key not in self._costs:
            copies = COPIES * bytes_of(carry)
            with ByteCounter() as counter:
                run_loop(work, carry, 1)
            cost: float = counter.bytes + copies
            if self.device.type == "cuda" and free is not None and count * cost > USABLE * free:
                tried = _peak_of_trial(*start(min(TRIAL_LANES, count)), self.device)
                cost = min(cost, tried + copies)
            self._costs[key] = cost
        return self._costs[key]

    def _log_plan(self, key: str, count: int, cost: float, free: int | None, level: int) -> None:
        size = evenly(count, self.most[key])
        chunks = -(-count // size)
        how = "at once" if chunks == 1 else f"in {chunks} chunks of {size}"
        memory = "free memory unknown" if free is None else f"{in_words(free)} free"
        self.plans[key] = f"{key} {how} (a lane takes {in_words(cost)}, {memory})"
        log.log(level, "%s", self.plans[key])


class ByteCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of every tensor that is made, whether it is kept or not."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not getattr(func, "is_view", False):
            tensors = (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
            self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return result


def _peak_of_trial(work: Work, carry: Groups, device: torch.device) -> float:
    """Return the peak of bytes for each lane in one vectorised step; infinity if the step fails."""
    try:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run_vmap(work, carry, 1)
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / len(work.table.sizes[0])
    except Exception:  # any error: it is reported when strategies are tried
        return float("inf")


def evenly(count: int, most: int) -> int:
    """Return the lanes of a chunk: as few chunks as possible, of nearly equal size."""
    chunks = -(-count // most)
    return -(-count // chunks)
