"""How many lanes go at once:

planned from what one takes and what is free, before the first of them starts.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from feddkd.engines.batched.folds import Work, run_loop, run_vmap
from feddkd.tensors import Groups, bytes_of

log = logging.getLogger(__name__)
# of the free memory: the rest is for what other strategies need beyond the plain step, and for
# other programs
USABLE = 0.7
# of a lane's carry besides the step: at the start, in a recording, as upload and as memo
COPIES = 4
FEW = 4  # lanes in a trial


class Planner:
    """Lanes per chunk for each kind of work; `limit` in bytes stands in for the free memory."""

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        self.device, self.limit = device, limit
        self.plans: dict[str, str] = {}  # kind of work -> the plan in words
        self._costs: dict[object, float] = {}
        self.most: dict[str, int] = {}  # kind of work -> lanes at once

    def lanes(
        self, kind: str, count: int, start: Callable[[int], tuple[Work, Groups]], trains: bool
    ) -> int:
        """At once, in chunks as equal as can be. `start` begins the work of the first so many."""
        key = f"{kind}: {count} lanes"
        if key not in self.most:
            free = self.limit if self.limit is not None else free_memory(self.device)
            cost = self._cost(kind, count, free, start)
            self.most[key] = (
                count if free is None else max(1, min(count, int(USABLE * free / cost)))
            )
            fits = self.most[key] == count
            self._tell(
                key, count, cost, free, logging.INFO if trains or not fits else logging.DEBUG
            )
        return evenly(count, self.most[key])

    def halve(self, kind: str, count: int, lanes: int) -> int:
        """The last resort, where the plan did not hold."""
        key, most = f"{kind}: {count} lanes", (lanes + 1) // 2
        self.most[key] = most
        self.plans[key] = f"{key} in chunks of {most} ({lanes} did not fit)"
        log.warning(
            "%s: %d lanes do not fit in memory; going on with %d at once", kind, lanes, most
        )
        return most

    def _cost(
        self, kind: str, count: int, free: int | None, start: Callable[[int], tuple[Work, Groups]]
    ) -> float:
        """Bytes a lane.

        All that a step ever allocates is an upper estimate, and mostly enough to know; else a step
        is tried.
        """
        work, carry = start(1)
        key = work.client, work.tape.indices.shape[2], work.dtype
        if key not in self._costs:
            with Tally() as tally:
                run_loop(work, carry, 1)
            self._costs[key] = tally.bytes + COPIES * bytes_of(carry)
            if (
                self.device.type == "cuda"
                and free is not None
                and count * self._costs[key] > USABLE * free
            ):
                self._costs[key] = min(
                    self._costs[key],
                    _tried(*start(min(FEW, count)), self.device) + COPIES * bytes_of(carry),
                )
        return self._costs[key]

    def _tell(self, key: str, count: int, cost: float, free: int | None, level: int) -> None:
        size = evenly(count, self.most[key])
        chunks = -(-count // size)
        how = "at once" if chunks == 1 else f"in {chunks} chunks of {size}"
        room = "free memory unknown" if free is None else f"{in_words(free)} free"
        self.plans[key] = f"{key} {how} (a lane takes {in_words(cost)}, {room})"
        log.log(level, "%s", self.plans[key])


class Tally(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of every tensor that is made, whether it is kept or not."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not getattr(func, "is_view", False):
            self.bytes += sum(
                t.numel() * t.element_size() for t in tree_leaves(result) if isinstance(t, Tensor)
            )
        return result


def _tried(work: Work, carry: Groups, device: torch.device) -> float:
    """Bytes a lane at the height of one vectorised step; without bound where that cannot be carried
    out.
    """
    try:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run_vmap(work, carry, 1)
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / len(work.tape.sizes[0])
    except Exception:  # whatever it is will be told of when strategies are tried
        return float("inf")


def free_memory(device: torch.device) -> int | None:
    """Bytes; None where nobody can tell."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    told = Path("/proc/meminfo")
    if told.exists():
        lines = dict(
            line.split(":", 1)
            for line in told.read_text(encoding="utf-8").splitlines()
            if ":" in line
        )
        if "MemAvailable" in lines:
            return int(lines["MemAvailable"].split()[0]) * 1024
    if "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def peak_memory(device: torch.device) -> int | None:
    """Bytes at most so far: on a GPU what torch holds there, else what this process holds and the
    largest of its workers.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    return 1024 * sum(
        resource.getrusage(who).ru_maxrss
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )


def ran_out(error: BaseException | None) -> bool:
    """Whether an error, or what led to it, is that memory ran out. CUDA has several ways to say so:
    its own calls fail in other words than torch's allocator, and while a graph is recorded the end
    of the recording fails in place of what ended it.
    """
    found = isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error)
    )
    return found or (error is not None and ran_out(error.__cause__ or error.__context__))


def evenly(count: int, most: int) -> int:
    """Lanes a chunk: as few chunks as can be, and none much smaller than the others."""
    chunks = -(-count // most)
    return -(-count // chunks)


def in_words(size: float) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} bytes"
