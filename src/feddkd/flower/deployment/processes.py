"""Starts processes and ends them, each by its own number; none of them outlives this process."""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from feddkd.errors import InputError

PATIENCE = 8.0  # seconds between the signal to end and SIGKILL
MOST_LOG = 10_000_000  # bytes
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def free_port() -> int:
    """Return a port of this machine that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_free(host: str, port: int) -> None:
    """Raise InputError if another process listens on a port."""
    with socket.socket() as probe:
        # a port that was released a moment ago counts as free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise InputError(
                f"cannot listen on {host}:{port}: {error}; choose another port with --port"
            ) from None


class Processes:
    """A context manager whose processes are ended when it is left, also by an exception."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self, name: str, command: Sequence[object], environment: Mapping[str, str] | None = None
    ) -> None:
        """Start a process in a new session, with its output in a file.

        Ctrl-C does not reach it there.
        """
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
        """Return the file with a process's output."""
        return self._folder / f"{name}.log"

    def limit_logs(self) -> None:
        """Empty each log that is too long; its content is kept as NAME.log.1."""
        for name in list(self.running):
            log = self.log(name)
            if log.stat().st_size > MOST_LOG:
                shutil.copyfile(log, log.with_suffix(".log.1"))
                os.truncate(log, 0)  # the process writes at the end, wherever it is

    def check(self) -> None:
        """Raise InputError if a process has ended."""
        for name, process in self.running.items():
            if process.poll() is not None:
                raise InputError(
                    f"{name} has ended with status {process.returncode}: {self.log_end(name)}"
                )

    def log_end(self, name: str) -> str:
        """Return the end of a process's output."""
        lines = self.log(name).read_text(encoding="utf-8", errors="replace").splitlines()
        return " ".join(line.strip() for line in lines if line.strip())[-500:]

    def end(self, *names: str, by: signal.Signals = signal.SIGTERM) -> None:
        """End some processes by a signal, and kill them if they take longer than PATIENCE."""
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

    def __exit__(self, *error: object) -> None:
        self.end(*self.running)


def _signal(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    if process.poll() is None:
        os.killpg(process.pid, number)  # the processes that it started are in its session


def _die_with_parent() -> None:
    """Ask the kernel to end the child when this process has ended for any reason."""
    ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGTERM)
