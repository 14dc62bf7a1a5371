"""Allocations that fail during a run: one line, whole files, and the same numbers later."""

from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from feddkd.engines.memory import ran_out
from feddkd.runs.record import survey
from feddkd.runs.runner import execute
from feddkd.runs.session import Every
from interrupted import content, experiment

POINTS = 6  # moments over the whole run


class LittleMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operation from the n-th on to make a tensor finds no memory, or only the n-th."""

    def __init__(self, n: int, once: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.n, self.once, self.made = n, once, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not getattr(func, "is_view", False):
            self.made += 1
            if self.made == self.n or (self.made > self.n and not self.once):
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: 1 byte")
        return func(*args, **(kwargs or {}))


def play(out: Path, engine: str) -> None:
    one = experiment(rounds=2, model="mlp(hidden='2')")
    options = {"strategy": "vmap"} if engine == "batched" else {}
    execute([one], out=out, engine=engine, options=options, every=Every(rounds=1))


def fail(out: Path, engine: str, memory: LittleMemory) -> Exception | None:
    """Run with little memory; return the error."""
    try:
        with memory:
            play(out, engine)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("engine", ["serial", "batched"])
@pytest.mark.parametrize("once", [True, False])
def test_whenever_memory_runs_out_the_run_goes_on_later_to_the_same_numbers(
    engine: str, once: bool, tmp_path: Path
) -> None:
    play(tmp_path / "whole", engine)
    whole = content(tmp_path / "whole")
    counting = LittleMemory(0, once=True)
    with counting:
        play(tmp_path / "counted", engine)
    failed = 0
    for point in range(POINTS):
        out, n = tmp_path / str(point), 1 + point * (counting.made - 1) // POINTS
        error = fail(out, engine, LittleMemory(n, once))
        failed += error is not None
        assert error is None or ran_out(error), n
        if any(out.rglob("manifest.json")):
            assert not survey(out, begun=True).errors, n
        if not (once and engine == "batched"):  # a chunk that was halved rounds otherwise
            play(out, engine)
            assert content(out) == whole, n
    assert failed > POINTS // 2
