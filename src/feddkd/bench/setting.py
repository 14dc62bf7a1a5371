"""Where and how a measurement is made: engine, device, arithmetic."""

import inspect
import os
import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from feddkd.engines.select import ENGINES, find_device, find_engine
from feddkd.errors import InputError, choices

DTYPES = {
    "tf32": torch.float32,
    "fp32": torch.float32,
    "bf16": torch.float32,
    "fp64": torch.float64,
}


@dataclass(frozen=True)
class BenchSetting:
    engine: str
    device: torch.device
    precision: str
    repeats: int
    strategy: str | None = None

    @property
    def dtype(self) -> torch.dtype:
        """That of weights and data; bf16 is a matter of casting in between."""
        return DTYPES[self.precision]

    @property
    def options(self) -> dict[str, Any]:
        """What the engine is told beyond the four things every engine takes."""
        takes = inspect.signature(find_engine(self.engine)).parameters
        # that is a matter of dtype
        precision = None if self.precision == "fp64" else self.precision
        wanted = {"precision": precision, "strategy": self.strategy}
        given = {
            name: value for name, value in wanted.items() if name in takes and value is not None
        }
        if self.precision == "bf16" and "precision" not in given:
            raise InputError(f"engine {self.engine!r} knows no precision bf16")
        if self.strategy is not None and "strategy" not in given:
            raise InputError(f"engine {self.engine!r} has no strategies to choose from")
        return given

    @property
    def device_name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"cpu ({_processor()}, {os.cpu_count()} cores)"

    def cast(self) -> AbstractContextManager[Any]:
        """Around forward passes of code that is not an engine's."""
        return (
            torch.autocast(self.device.type, torch.bfloat16)
            if self.precision == "bf16"
            else nullcontext()
        )

    @contextmanager
    def arithmetic(self) -> Iterator[None]:
        """tf32 allowed or not, as the precision says; put back afterwards.

        Set by the older of torch's two ways, which leaves both in agreement: torch.compile still
        asks by the older one.
        """
        if self.device.type != "cuda":
            yield
            return
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        before = matmul.fp32_precision == "tf32", cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
        try:
            matmul.allow_tf32 = cudnn.allow_tf32 = self.precision in ("tf32", "bf16")
            yield
        finally:
            matmul.allow_tf32, cudnn.allow_tf32 = before


def setting(
    *,
    engine: str | None = None,
    device: str | None = None,
    precision: str | None = None,
    strategy: str | None = None,
    repeats: int = 5,
) -> BenchSetting:
    """Checked; what is not said is chosen: a GPU where there is one, tf32 there and fp32 elsewhere,
    the fastest engine.
    """
    place = find_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    name = engine or next(name for name in ("auto", "batched", "serial") if name in ENGINES)
    find_engine(name)
    precision = precision or ("tf32" if place.type == "cuda" else "fp32")
    # engines cast on a GPU alone
    there = [name for name in DTYPES if place.type == "cuda" or name not in ("tf32", "bf16")]
    if precision not in there:
        raise InputError(
            f"unknown precision {precision!r} on {place.type}; there are: {choices(there)}"
        )
    chosen = BenchSetting(name, place, precision, repeats, strategy)
    _ = chosen.options  # complain before anything is measured
    return chosen


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
