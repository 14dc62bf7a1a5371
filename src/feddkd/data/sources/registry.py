"""Data sources by name: how each is had."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from feddkd.data.examples import Data
from feddkd.spec.registry import Registry, Spelled


@dataclass(frozen=True, eq=False)
class Source(Spelled):
    """How one set of data is had: what must be in the folder, where to get it, how to read it."""

    load: Callable[[Path | None], Data]
    files: tuple[str, ...]
    origin: str
    transform: str
    summary: str


SOURCES: Registry[Source] = Registry("data source", "feddkd.data")
