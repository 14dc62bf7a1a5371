"""Processes that we start, and end: each by its own number, and none outlives us."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from feddkd.errors import InputError

PATIENCE = 8.0  # seconds between a polite request to end and one that cannot be refused
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_free(host: str, port: int) -> None:
    """Somebody else's port is told at once, and not in the words of whoever cannot have it."""
    with socket.socket() as probe:
        # one that was given back a moment ago is free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise InputError(
                f"cannot listen on {host}:{port}: {error}; --port takes another"
            ) from None


class Processes:
    """While it is entered, processes may be started; when it is left, by whatever door, they are
    ended.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self, name: str, command: Sequence[object], environment: Mapping[str, str] | None = None
    ) -> None:
        """In a session of its own, so that Ctrl-C reaches us alone; what it says goes to a file."""
        with self.log(name).open("ab") as file:
            self.running[name] = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )

    def log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def check(self) -> None:
        """All of them are still there."""
        for name, process in self.running.items():
            if process.poll() is not None:
                raise InputError(
                    f"{name} has ended with status {process.returncode}: {self.last_words(name)}"
                )

    def last_words(self, name: str) -> str:
        lines = self.log(name).read_text(encoding="utf-8", errors="replace").splitlines()
        return " ".join(line.strip() for line in lines if line.strip())[-500:]

    def end(self, *names: str, by: signal.Signals = signal.SIGTERM) -> None:
        """End some of them; they have a moment to say goodbye."""
        ending = [self.running.pop(name) for name in names]
        for process in ending:
            _signal(process, by)
        limit = time.monotonic() + PATIENCE
        for process in ending:
            try:
                process.wait(max(limit - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                _signal(process, signal.SIGKILL)
                process.wait()

    def __enter__(self) -> "Processes":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end(*self.running)


def _signal(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    if process.poll() is None:
        os.killpg(process.pid, number)  # its session is its own: whatever it started is in it


def _die_with_parent() -> None:
    """The kernel ends the child when we are gone, however that came about."""
    ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGTERM)
