"""The lock of a run's folder: one process at a time writes there.

The kernel holds the lock and releases it when the process ends, however it ends.
"""

import os
import socket
from pathlib import Path

from feddkd.errors import InputError

try:
    import fcntl
except ImportError:  # not a Unix: folders are not locked
    fcntl = None  # type: ignore[assignment]


class BusyError(InputError):
    """Another process writes to the folder, or has finished the run in it meanwhile."""


class Lock:
    """The lock file of a folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lock"
        self._file = -1

    def take(self) -> None:
        """Lock the folder, or raise a BusyError that names the process that holds the lock."""
        while fcntl is not None:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                content = os.read(self._file, 200).decode(errors="replace").strip()
                os.close(self._file)
                self._file = -1
                raise BusyError(
                    f"{self.path.parent} is being written by {content or 'another process'};"
                    " wait for it, or stop it"
                ) from None
            if self._still_there():
                self._sign()
                return
            os.close(self._file)  # the last holder has removed the file in between: try again

    def give_back(self) -> None:
        """Unlock the folder and remove the file."""
        if self._file >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1

    def _sign(self) -> None:
        """Write into the file which process this is; give the lock back if that fails."""
        try:
            os.ftruncate(self._file, 0)
            os.write(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        except OSError:
            self.give_back()
            raise

    def _still_there(self) -> bool:
        try:
            return os.fstat(self._file).st_ino == self.path.stat().st_ino
        except FileNotFoundError:
            return False
