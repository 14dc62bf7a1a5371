"""Versions, machine and settings of a run, and those of them that may change rounding."""

import platform
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy
import torch

from feddkd.version import __version__, commit

CIRCUMSTANCES = ("engine", "precision", "started", "command", "versions", "hardware")


def circumstances(
    engine: str,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the part of a manifest that says how and where a run is carried out."""
    on_gpu, code = device.type == "cuda", commit()
    name = torch.cuda.get_device_name(device) if on_gpu else platform.processor() or "cpu"
    return {
        # `finish` adds what the engine chose
        "engine": {"name": engine, **{key: str(value) for key, value in (options or {}).items()}},
        "precision": _precision(on_gpu, dtype, options or {}),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "versions": {
            "feddkd": __version__,
            **({} if code is None else {"commit": code[0] + (", changed" if code[1] else "")}),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": numpy.__version__,
        },
        "hardware": {
            "machine": platform.machine(),
            "system": platform.platform(),
            "device": name,
            "threads": torch.get_num_threads(),
        },
    }


def _precision(on_gpu: bool, dtype: torch.dtype, options: Mapping[str, Any]) -> str:
    """Return the precision of a run's arithmetic. On a GPU the default is tf32, as in torch's own
    convolutions.
    """
    if dtype == torch.float64:
        return "fp64"
    asked = str(options.get("precision", "tf32"))
    return "fp32" if asked == "tf32" and not on_gpu else asked


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the circumstances that differ and may change the rounding, with both values.

    `before` is a manifest, whose last continuation counts.
    """
    last = before["resumed"][-1] if before.get("resumed") else before
    was, is_now = _that_round(last), _that_round(now)
    return {
        name: [was[name], value]
        for name, value in is_now.items()
        if was.get(name, "unknown") not in ("unknown", value)
    }


def _that_round(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the circumstances on which the rounding of a run's numbers depends."""
    engine = facts.get("engine")
    known = engine if isinstance(engine, Mapping) else {"name": "unknown"}  # an old record
    name = known["name"] if known["name"] != "auto" else "unknown"
    return {
        **{key: facts.get("versions", {}).get(key, "unknown") for key in ("feddkd", "torch")},
        **{key: facts.get("hardware", {}).get(key, "unknown") for key in ("device", "threads")},
        "engine": name,
        **{key: known.get(key, "default") for key in ("strategy", "precision")},
    }
