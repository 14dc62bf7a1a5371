"""The setting of a measurement: engine, device and precision."""

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
from feddkd.errors import InputError, unknown

DTYPES = {
    "tf32": torch.float32,
    "fp32": torch.float32,
    "bf16": torch.float32,
    "fp64": torch.float64,
}


@dataclass(frozen=True)
class BenchSetting:
    """The engine, the device and the precision of a measurement."""

    engine: str
    device: torch.device
    precision: str
    repeats: int
    strategy: str | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights and data; bf16 only casts inside forward passes."""
        return DTYPES[self.precision]

    @property
    def options(self) -> dict[str, Any]:
        """The engine's options, besides the four parameters of every engine."""
        takes = inspect.signature(find_engine(self.engine)).parameters
        precision = None if self.precision == "fp64" else self.precision  # fp64 is in dtype
        wanted = {"precision": precision, "strategy": self.strategy}
        given = {
            name: value for name, value in wanted.items() if name in takes and value is not None
        }
        if self.precision == "bf16" and "precision" not in given:
            raise InputError(f"engine {self.engine!r} does not support precision 'bf16'")
        if self.strategy is not None and "strategy" not in given:
            raise InputError(f"engine {self.engine!r} has no strategies to choose from")
        return given

    @property
    def device_name(self) -> str:
        """The name of the GPU or of the processor."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"cpu ({_processor()}, {os.cpu_count()} cores)"

    def cast(self) -> AbstractContextManager[Any]:
        """Return the context for forward passes outside an engine."""
        if self.precision == "bf16":
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()

    @contextmanager
    def arithmetic(self) -> Iterator[None]:
        """Allow or forbid tf32 as the precision says, and restore torch's setting at the end.

        This uses the older of torch's two interfaces, which keeps both consistent: torch.compile
        still reads the older one.
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
    """Return a setting, or raise InputError if it is not possible.

    The defaults are a GPU if there is one, tf32 on a GPU and fp32 on a CPU, and the fastest engine.
    """
    torch_device = find_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    name = engine or next(name for name in ("auto", "batched", "serial") if name in ENGINES)
    find_engine(name)
    precision = precision or ("tf32" if torch_device.type == "cuda" else "fp32")
    # engines use tf32 and bf16 only on a GPU
    known = [name for name in DTYPES if torch_device.type == "cuda" or name not in ("tf32", "bf16")]
    if precision not in known:
        problem = f"unknown precision {precision!r} on {torch_device.type}"
        raise unknown(problem, precision, known)
    chosen = BenchSetting(name, torch_device, precision, repeats, strategy)
    _ = chosen.options  # raises an error before anything is measured
    return chosen


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
