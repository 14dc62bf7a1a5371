"""Memory: how much is free, how much was used at most, and whether an error says that it ran out.

On a CPU the limits of the process count, too: those of its control groups (as Docker, Kubernetes
and Slurm set them) and of `ulimit`.
"""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import torch

try:
    import resource
except ImportError:  # not a Unix
    resource = None  # type: ignore[assignment]

ROOT = Path("/")
# words of torch's allocators, on a GPU and on a CPU
NO_MEMORY = ("out of memory", "DefaultCPUAllocator", "std::bad_alloc")


def free_memory(device: torch.device) -> int | None:
    """Return the free bytes, or None if the system does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    known = [*_free_of_machine(), *free_in_groups(ROOT), *_free_in_limits()]
    return max(min(known), 0) if known else None


def _free_of_machine() -> Iterator[int]:
    values = _numbers(ROOT / "proc/meminfo")
    if "MemAvailable" in values:
        yield values["MemAvailable"] * 1024
    elif "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):
        yield os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_in_groups(root: Path) -> Iterator[int]:
    """Yield the free bytes of each control group with a limit that this process is in."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            yield from _free(root / "sys/fs/cgroup", path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            files = "memory.limit_in_bytes", "memory.usage_in_bytes"
            yield from _free(root / "sys/fs/cgroup/memory", path, *files)


def _free(mount: Path, path: str, limit: str, usage: str) -> Iterator[int]:
    """Yield the free bytes of a group and of the groups that contain it.

    In a container the path may be that of the host; then only the mounted group is there.
    """
    group = mount / path.strip("/")
    for folder in (group, *group.parents):
        most, used = _text(folder / limit).strip(), _text(folder / usage).strip()
        if most.isdecimal() and used.isdecimal():
            stat = _numbers(folder / "memory.stat")
            given_back = stat.get("total_inactive_file", stat.get("inactive_file", 0))
            yield int(most) - int(used) + given_back
        if folder == mount:
            return


def _free_in_limits() -> Iterator[int]:
    """Yield the bytes that `ulimit -v` and `ulimit -d` leave."""
    pages = _text(ROOT / "proc/self/statm").split()
    if resource is None or len(pages) < 6:
        return
    for kind, used in ((resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5])):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            yield limit - int(used) * resource.getpagesize()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _numbers(path: Path) -> dict[str, int]:
    """Return the first number of each line of a file, by the line's name."""
    words = (line.replace(":", " ").split() for line in _text(path).splitlines())
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdecimal()}


def peak_memory(device: torch.device) -> int | None:
    """Return the peak of bytes so far.

    On a GPU this is the memory of torch; else that of this process plus that of its largest worker.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if resource is None:
        return None
    processes = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return 1024 * sum(resource.getrusage(process).ru_maxrss for process in processes)


def ran_out(error: BaseException | None) -> bool:
    """Return whether an error, or its cause, says that memory ran out.

    CUDA has several messages for this: its own calls fail with other words than torch's allocator,
    and while a graph is recorded the error comes from the end of the recording.
    """
    if error is None:
        return False
    text = str(error)
    out_of_memory = (
        isinstance(error, torch.OutOfMemoryError | MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError) and any(words in text for words in NO_MEMORY))
    )
    return out_of_memory or ran_out(error.__cause__ or error.__context__)


def in_words(size: float) -> str:
    """Return a number of bytes in a fitting unit."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} bytes"
