"""One writer a folder.

The lock is the kernel's: it goes with the process that holds it, so a stale one cannot be.
"""

import os
import socket
from pathlib import Path

from feddkd.errors import InputError

try:
    import fcntl
except ImportError:  # not a Unix: nobody is kept out
    fcntl = None  # type: ignore[assignment]


class Lock:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "lock"
        self._file = -1

    def take(self) -> None:
        """Or say who has it."""
        while fcntl is not None:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                holder = (
                    os.read(self._file, 200).decode(errors="replace").strip() or "another process"
                )
                os.close(self._file)
                self._file = -1
                raise InputError(
                    f"{self.path.parent} is being written by {holder}; wait for it, or stop it"
                ) from None
            if self._still_there():
                os.ftruncate(self._file, 0)
                os.write(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                return
            os.close(self._file)  # whoever had it has just removed it: there is a new one by now

    def give_back(self) -> None:
        if self._file >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1

    def _still_there(self) -> bool:
        try:
            return os.fstat(self._file).st_ino == self.path.stat().st_ino
        except FileNotFoundError:
            return False
