"""Engines and devices by name."""

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from feddkd.data.federation import Federation
from feddkd.engines.batched.engine import Batched
from feddkd.engines.interface import Engine
from feddkd.engines.pool.engine import Pool
from feddkd.engines.serial import Serial
from feddkd.errors import InputError, choices
from feddkd.models.functional import Model
from feddkd.tensors import Groups

ENGINES: Mapping[str, Callable[..., Engine]] = {"serial": Serial, "batched": Batched, "pool": Pool}
FLOWER = ("flower", "flower-secure")


def find_engine(name: str) -> Callable[..., Engine]:
    if name in FLOWER:  # only inside a federation, and an extra: not among the choices
        try:
            from feddkd.flower.engine import Flower
            from feddkd.flower.secure import Secure
        except ModuleNotFoundError:
            raise InputError(f"engine {name!r} needs Flower: pip install 'feddkd[flower]'") from None
        return Flower if name == "flower" else Secure
    if name not in ENGINES:
        raise InputError(f"unknown engine {name!r}; there are: {choices(('auto', *ENGINES))}")
    return ENGINES[name]


def open_engine(
    name: str,
    model: Model,
    federations: Sequence[Federation],
    memos: Sequence[Groups],
    dtype: torch.dtype,
    options: Mapping[str, Any],
) -> Engine:
    """An engine by name. `auto`: clients as one program, but convolutions on a CPU go to one process a core."""
    if name == "auto":
        alone = federations[0].x.is_cuda or sys.platform != "linux" or (os.cpu_count() or 1) == 1
        name = "pool" if model.convolves and not alone else "batched"
    make = find_engine(name)
    unknown = set(options) - set(inspect.signature(make).parameters)
    if unknown:
        raise InputError(f"engine {name!r} takes no {choices(unknown)}; 'batched' does")
    return make(model, federations, memos, dtype, **options)


def find_device(name: str) -> torch.device:
    try:
        device = torch.device(name if str(name).startswith(("cpu", "cuda")) else "")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise InputError(f"device {name!r} is not to be had here; 'cpu' always is, 'cuda' where torch sees a GPU") from None
    return device
