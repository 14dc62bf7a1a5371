"""Stopping a run by a signal.

The first SIGINT or SIGTERM lets the round end and be saved; the second stops at once.
"""

import logging
import signal
import threading
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)


class Halted(Exception):  # noqa: N818  # not an error: the user asked for it
    """A run stopped between two rounds because a signal asked for it."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.status = 128 + number  # the exit status of a process that a signal ended


class Enough(Exception):  # noqa: N818  # as above
    """A run stopped between two rounds because no more rounds were wanted for now."""


class Halt:
    """A context in which `asked` is the number of the signal that asked for a stop, or None."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Halt":
        # Python allows signal handlers in the main thread only
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore_handlers()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = number
        self._restore_handlers()
        log.warning("stopping after this round; repeat the signal to stop at once")

    def _restore_handlers(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
