"""The registry of data sources."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from feddkd.data.examples import Data
from feddkd.spec.registry import Registry, Spelled


@dataclass(frozen=True, eq=False)
class Source(Spelled):
    """A data set that can be loaded: the files it needs, their origin, and their reader."""

    load: Callable[[Path | None], Data]  # data folder -> data
    files: tuple[str, ...]
    origin: str
    transform: str
    summary: str


DIGITS = tuple("0123456789")  # the labels of every data set of digits
SOURCES: Registry[Source] = Registry("data source", "feddkd.data")
