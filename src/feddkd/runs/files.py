"""Writing files completely or not at all."""

import os
from pathlib import Path


def put(path: Path, content: bytes) -> None:
    """Write a file completely or not at all, also if the power fails."""
    part = path.with_suffix(path.suffix + ".part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class Appended:
    """A file that is written at its end, without a buffer: after an error nothing waits in it."""

    def __init__(self, path: Path, mode: str = "ab") -> None:
        self._file = path.open(mode, buffering=0)

    def append(self, content: bytes) -> None:
        """Write at the end of the file."""
        while content:
            content = content[self._file.write(content) :]

    def sync(self) -> None:
        """Wait until the content is on disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
