"""How a run is asked to stop:

the first SIGINT or SIGTERM lets the round end and be saved, the second stops at once.
"""

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

log = logging.getLogger(__name__)


class Halted(Exception):  # noqa: N818  # not an error: somebody asked for it
    """A run stopped between two rounds because a signal asked for it."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.status = 128 + number  # what a shell reports of a process that a signal ended


class Enough(Exception):  # noqa: N818  # as above
    """A run stopped between two rounds because no more rounds were wanted for now."""


class Halt:
    """While it is entered, `asked` holds the number of the signal that asked for a stop."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Halt":
        # Python lets nobody else touch signals
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._ask)
                for number in (signal.SIGINT, signal.SIGTERM)
            }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._give_back()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = number
        self._give_back()
        log.warning("stopping after this round; once more to stop at once")

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
