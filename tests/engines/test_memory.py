"""Memory: limits of control groups and of `ulimit`, and allocations that fail on a CPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from feddkd import simulate
from feddkd.engines.batched.engine import Batched
from feddkd.engines.memory import free_in_groups, free_memory, ran_out

CPU = torch.device("cpu")
MIB = 1 << 20


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_the_free_memory_of_every_enclosing_group_counts_in_version_2(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/jobs/one\n",
            f"{folder}/jobs/one/memory.max": "max\n",
            f"{folder}/jobs/one/memory.current": "400\n",
            f"{folder}/jobs/memory.max": "1000\n",
            f"{folder}/jobs/memory.current": "700\n",
            f"{folder}/jobs/memory.stat": "anon 500\ninactive_file 150\n",
        },
    )
    assert list(free_in_groups(tmp_path)) == [1000 - 700 + 150]


def test_groups_of_version_1_and_of_a_container_that_sees_the_hosts_path(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/ab\n4:memory:/docker/ab\n0::/\n",
            f"{folder}/memory.limit_in_bytes": "9000\n",
            f"{folder}/memory.usage_in_bytes": "4000\n",
            f"{folder}/memory.stat": "inactive_file 1\ntotal_inactive_file 500\n",
        },
    )
    assert list(free_in_groups(tmp_path)) == [5500]


def test_without_groups_nothing_is_known_of_them(tmp_path: Path) -> None:
    assert list(free_in_groups(tmp_path)) == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_limit_of_ulimit_counts() -> None:
    text = (
        "import resource, torch; from feddkd.engines.memory import free_memory;"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize();"
        "resource.setrlimit(resource.RLIMIT_AS, (size + 300 * 2**20, resource.RLIM_INFINITY));"
        "print(free_memory(torch.device('cpu')))"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert 250 * MIB < int(done.stdout) <= 300 * MIB


def test_free_memory_is_known_here() -> None:
    free = free_memory(CPU)
    assert free is not None
    assert free > 0


def failed_allocation() -> BaseException:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        torch.empty(1 << 60)
    return caught.value


def test_a_failed_allocation_on_a_cpu_is_known_as_such() -> None:
    assert ran_out(failed_allocation())
    assert ran_out(MemoryError())
    assert ran_out(OSError(12, "Cannot allocate memory"))
    assert not ran_out(RuntimeError("shapes differ"))
    assert not ran_out(OSError(28, "No space left on device"))


def test_what_does_not_fit_on_a_cpu_is_computed_in_smaller_chunks_to_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    error, whole = failed_allocation(), Batched._fold_chunk

    def fold_chunk(self: Batched, exchange, client, orders, lanes):  # type: ignore[no-untyped-def]
        if len(lanes) > 2:
            raise error
        return whole(self, exchange, client, orders, lanes)

    draw = torch.Generator().manual_seed(0)
    clients = [(torch.randn(6, 3, generator=draw), torch.arange(6) % 2) for _ in range(7)]
    net = nn.Linear(3, 2).double()

    def played() -> dict[str, torch.Tensor]:
        method = "fedavg(epochs=1, batch_size=3)"
        ours = simulate(
            model=net, clients=clients, test=clients[0], method=method, engine="batched"
        )
        return dict(ours.params)

    expected = played()
    monkeypatch.setattr(Batched, "_fold_chunk", fold_chunk)
    found = played()
    assert "do not fit in memory; continuing with 2 at once" in caplog.text
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=1e-12, atol=1e-12)


def test_the_smallest_of_all_limits_is_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n",
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "7000\n",
        "sys/fs/cgroup/memory.current": "1000\n",
    }
    write(tmp_path, files)
    monkeypatch.setattr("feddkd.engines.memory.ROOT", tmp_path)
    assert free_memory(CPU) == 6000
