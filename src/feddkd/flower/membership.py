"""Membership: the node that stands for each client, in federations with keys."""

import re
from typing import Protocol

_PINNED = re.compile(r"(\d{1,9})(-.*)?")


def pinned_client(name: str) -> int | None:
    """Return the client that the key NAME.pub is for, if its name begins with a number: 3-NAME."""
    match = _PINNED.fullmatch(name)
    return int(match[1]) if match else None


class Membership(Protocol):
    """Facts about nodes beside the numbers that Flower gives them."""

    def name(self, node: int) -> str | None:
        """Return the name of a node's key, or None if it is not known."""

    def is_member(self, node: int) -> bool:
        """Return whether a node may take part."""

    def check(self, client: int, node: int) -> None:
        """Raise WireError if a client belongs to another key than the node's."""

    def bind(self, client: int, node: int) -> None:
        """Remember that a client belongs to the key of a node."""


class AnyMember:
    """Knows no keys: the first node of a client stands for it until the end of the run."""

    def name(self, node: int) -> str | None:
        """Return None."""
        return None

    def is_member(self, node: int) -> bool:
        """Return True."""
        return True

    def check(self, client: int, node: int) -> None:
        """Allow it."""

    def bind(self, client: int, node: int) -> None:
        """Remember nothing."""
