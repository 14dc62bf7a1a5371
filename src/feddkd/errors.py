"""What can go wrong and is worth a name: the user's input, a client, a run."""

import traceback
from collections.abc import Iterable


class InputError(ValueError):
    """Something the user wrote or handed in cannot be used.

    One line; names the thing and what would be right.
    """


class ClientError(RuntimeError):
    """A client failed in an exchange; the message carries phase, client and key, so that it can be
    replayed.
    """


class RunError(RuntimeError):
    """A run cannot go on. Those beside it can."""


class NobodyAnsweredError(RunError):
    """An exchange came back empty; the message names the phase and the round."""


class DivergedError(RunError):
    """Numbers are no longer finite; the message names the phase, and the client and its key if it
    was one.
    """


def choices(names: Iterable[str]) -> str:
    """The right answers, for the end of an error line."""
    return ", ".join(sorted(names))


def line_of(error: BaseException) -> str:
    """Return where in the user's own code an error was raised, for the end of a message."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if "/torch/" not in frame.filename and "/feddkd/" not in frame.filename
    ]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
