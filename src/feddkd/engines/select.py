"""Find engines and devices by their names."""

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from feddkd.data.federation import Federation
from feddkd.engines.batched.engine import Batched
from feddkd.engines.interface import Engine, EngineFactory
from feddkd.engines.pool.engine import Pool
from feddkd.engines.serial import Serial
from feddkd.errors import InputError, choices, unknown
from feddkd.models.functional import Model
from feddkd.tensors import Groups

ENGINES: Mapping[str, Callable[..., Engine]] = {"serial": Serial, "batched": Batched, "pool": Pool}


def find_engine(name: str) -> Callable[..., Engine]:
    """Return the engine class with this name; raise an InputError if there is none."""
    if name.startswith("flower"):
        raise InputError(
            f"engine {name!r} runs inside a federation: feddkd flower up FILE.toml starts one on"
            " this machine"
        )
    if name not in ENGINES:
        raise unknown(f"unknown engine {name!r}", name, ("auto", *ENGINES))
    return ENGINES[name]


def check_engine(engine: str | EngineFactory) -> None:
    """Raise an InputError if this is the name of an engine that does not exist."""
    if isinstance(engine, str) and engine != "auto":
        find_engine(engine)


def accepts(engine: str, option: str) -> bool:
    """Return whether an engine has an option; "auto" may choose an engine that has it."""
    names = ENGINES if engine == "auto" else [engine]
    return any(option in inspect.signature(find_engine(name)).parameters for name in names)


def open_engine(
    engine: str | EngineFactory,
    model: Model,
    federations: Sequence[Federation],
    memos: Sequence[Groups],
    dtype: torch.dtype,
    options: Mapping[str, Any],
) -> Engine:
    """Return a new engine.

    "auto" is batched, or pool for networks with convolutions on a CPU with several cores.
    """
    if not isinstance(engine, str):
        return engine(model, federations, memos, dtype, **options)
    name = _automatic(model, federations) if engine == "auto" else engine
    make = find_engine(name)
    unknown = set(options) - set(inspect.signature(make).parameters)
    if unknown:
        raise InputError(f"engine {name!r} takes no {choices(unknown)}; 'batched' does")
    return make(model, federations, memos, dtype, **options)


def _automatic(model: Model, federations: Sequence[Federation]) -> str:
    on_gpu = federations[0].device.type == "cuda"
    can_fork = sys.platform == "linux" and (os.cpu_count() or 1) > 1
    return "pool" if model.convolves and can_fork and not on_gpu else "batched"


def find_device(name: str) -> torch.device:
    """Return a device by its name; raise an InputError if torch cannot use it."""
    try:
        device = torch.device(name if str(name).startswith(("cpu", "cuda")) else "")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        gpus = f"torch sees {count} GPUs" if count else "torch sees no GPU"
        raise InputError(f"device {name!r} is not available: {gpus}; use 'cpu'") from None
    return device
