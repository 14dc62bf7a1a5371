"""Writing files: completely or not at all, or line by line. Every error names the file."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
