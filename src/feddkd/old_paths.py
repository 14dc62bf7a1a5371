"""Old names of modules that the documentation of version 0.1 shows.

An import by the old name gives the module of today. A name that has moved out of a package gives a
DeprecationWarning.
"""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "feddkd.availability": "feddkd.rounds.availability",
    "feddkd.data.partition": "feddkd.data.partitions.registry",
    "feddkd.data.registry": "feddkd.data.sources.registry",
    "feddkd.keys": "feddkd.randomness",
    "feddkd.objectives": "feddkd.methods.losses",
    "feddkd.optimisers": "feddkd.methods.optimisers",
    "feddkd.params": "feddkd.tensors",
    "feddkd.prepare": "feddkd.runs.prepare",
    "feddkd.schedules": "feddkd.spec.schedules",
    "feddkd.spelling": "feddkd.spec.registry",
    "feddkd.values": "feddkd.spec.types",
}


class _Moved(MetaPathFinder, Loader):
    """Import hook that loads the module of today for an old name."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(MOVED[spec.name])

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module has been executed under its new name."""


def install() -> None:
    """Make the old names importable."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.append(_Moved())


def attribute(old: str, new: str, name: str) -> Any:
    """Return a name that a package had in version 0.1, and warn that it has moved.

    A package calls this in its `__getattr__`.
    """
    value = getattr(importlib.import_module(new), name, None)
    if value is None or name.startswith("__"):
        raise AttributeError(f"module {old!r} has no attribute {name!r}")
    warnings.warn(
        f"{old}.{name} has moved: import it from feddkd.extend", DeprecationWarning, stacklevel=3
    )
    return value
