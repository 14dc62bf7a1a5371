"""Writing files: completely or not at all, or line by line; reading files that may be damaged.

Every error names the file.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from feddkd.errors import InputError


class DamagedRunError(InputError):
    """Files of a run were changed since they were written."""


def content_of(path: Path) -> bytes | None:
    """Return the content of a file; None if there is none.

    Raise a DamagedRunError if it cannot be read, as a folder of that name.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedRunError(f"{path} cannot be read: {error.strerror}") from None


def parsed(text: str | bytes) -> Any:
    """Return the value in a JSON text, or raise a ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def put(path: Path, content: bytes) -> None:
    """Write a file completely or not at all, also if the power fails."""
    part = path.with_suffix(path.suffix + ".part")
    with naming(path):
        try:
            with part.open("wb", buffering=0) as file:
                write(file.fileno(), content)
                os.fsync(file.fileno())
            os.replace(part, path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def write(file: int, content: bytes) -> None:
    """Write all of the content to an open file."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(file, rest) :]


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to an OSError that does not name its file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


class Appended:
    """A file that is written at its end, without a buffer: after an error nothing waits in it."""

    def __init__(self, path: Path, mode: str = "ab") -> None:
        self.path, self._file = path, path.open(mode, buffering=0)

    def append(self, content: bytes) -> None:
        """Write at the end of the file."""
        with naming(self.path):
            write(self._file.fileno(), content)

    def sync(self) -> None:
        """Wait until the content is on disk."""
        with naming(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
