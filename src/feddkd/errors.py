"""What can go wrong and is worth a name: the user's input, a client, a run."""

from collections.abc import Iterable


class InputError(ValueError):
    """Something the user wrote or handed in cannot be used. One line; names the thing and what would be right."""


class ClientError(RuntimeError):
    """A client failed in an exchange; the message carries phase, client and key, so that it can be replayed."""


class RunError(RuntimeError):
    """A run cannot go on. Those beside it can."""


class NobodyAnsweredError(RunError):
    """An exchange came back empty; the message names the phase and the round."""


class DivergedError(RunError):
    """Numbers are no longer finite; the message names the phase, and the client and its key if it was one."""


def choices(names: Iterable[str]) -> str:
    """The right answers, for the end of an error line."""
    return ", ".join(sorted(names))
