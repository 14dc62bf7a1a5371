"""Find files from outside and read them with checks.

Such a file may be cut short, the wrong file, or hostile. So a reader checks the content against
the expected shapes and values, runs nothing and writes nothing. Every error in a reader becomes
one `InputError` that names the file.
"""

import bz2
import functools
import gzip
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from feddkd.errors import InputError

Array = NDArray[Any]
Pair = tuple[Array, Array]  # images (N, C, H, W) of unsigned bytes, labels (N,)
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class SourceFiles:
    """The files of one source, in the folders of its official release or in the data folder."""

    root: Path
    folders: tuple[str, ...]

    def find_or_none(self, *names: str) -> Path | None:
        """Return the first of these files that exists, or None."""
        paths = [self.root / folder / name for folder in (*self.folders, ".") for name in names]
        return next((path for path in paths if path.exists()), None)

    def find(self, *names: str) -> Path:
        """Return the first of these files that exists; raise an InputError if none does."""
        path = self.find_or_none(*names)
        if path is None:
            inside = " or ".join(f"{folder}/" for folder in self.folders)
            raise InputError(f"{' or '.join(names)} is not in {self.root} nor in its {inside}")
        return path


def reads(
    what: str,
) -> Callable[[Callable[Concatenate[Path, P], R]], Callable[Concatenate[Path, P], R]]:
    """Return a decorator that turns every error of a reader into one that names the file.

    It catches every Exception, because pickle, zlib, PIL, scipy and h5py raise almost any kind when
    a file is damaged.
    """

    def decorate(reader: Callable[Concatenate[Path, P], R]) -> Callable[Concatenate[Path, P], R]:
        @functools.wraps(reader)
        def guarded(path: Path, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return reader(path, *args, **kwargs)
            except InputError:
                raise
            except Exception as error:
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                raise InputError(f"{path} is missing, damaged or not {what}: {reason}") from error

        return guarded

    return decorate


def expect(holds: bool, otherwise: str) -> None:
    """Raise a ValueError with the text `otherwise` if a condition does not hold."""
    if not holds:
        raise ValueError(otherwise)


def read_content(path: Path, limit: int) -> bytes:
    """Return the content of a file, decompressed.

    The compression is read from the first bytes and not from the name, because browsers may
    decompress a file and keep its name.
    """
    with path.open("rb") as raw:
        start = raw.read(3)
        raw.seek(0)
        file: IO[bytes] | gzip.GzipFile | bz2.BZ2File = raw
        if start[:2] == b"\x1f\x8b":
            file = gzip.GzipFile(fileobj=raw)
        elif start == b"BZh":
            file = bz2.BZ2File(raw)
        content = file.read(limit + 1)
    expect(len(content) <= limit, f"it holds more than {limit:,} bytes")
    return content


def checked_labels(values: Any, least: int, most: int) -> NDArray[np.int64]:
    """Return labels as integers; raise a ValueError unless they are whole numbers in a range."""
    labels = np.asarray(values)
    expect(
        labels.ndim == 1 and len(labels) > 0 and labels.dtype.kind in "iuf",
        "the labels are not a list of numbers",
    )
    expect(bool(((labels >= least) & (labels <= most)).all()), f"labels outside {least}..{most}")
    expect(bool((labels == np.floor(labels)).all()), "labels that are not whole numbers")
    return labels.astype(np.int64)
