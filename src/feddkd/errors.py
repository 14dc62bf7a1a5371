"""What can go wrong and is worth a name: the user's input, a client, an exchange nobody answered."""

from collections.abc import Iterable


class InputError(ValueError):
    """Something the user wrote or handed in cannot be used. One line; names the thing and what would be right."""


class ClientError(RuntimeError):
    """A client failed in an exchange; the message carries phase, client and key, so that it can be replayed."""


class NobodyAnsweredError(RuntimeError):
    """An exchange came back empty; the message names the phase and the round."""


def choices(names: Iterable[str]) -> str:
    """The right answers, for the end of an error line."""
    return ", ".join(sorted(names))
