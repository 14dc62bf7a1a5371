"""The protocol of an engine, and the messages that go in and out.

An engine performs one exchange and knows nothing of rounds or methods. The rest of the package does
not know where clients compute. Engine, device and chunking change the speed of a run, and its
numbers by rounding only, so they are not part of an experiment.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from feddkd.data.batches import Source
from feddkd.method import Exchange
from feddkd.randomness import Key
from feddkd.tensors import Groups

Purpose = Literal["train", "evaluate", "diagnose", "select"]


def purpose_of(key: Key) -> Purpose:
    """Return the purpose of the exchange with this key.

    The key of an exchange of the method begins with a seed. The key of an evaluation, of a
    diagnosis or of a question for a selection begins with that word.
    """
    words: dict[object, Purpose] = {
        "evaluate": "evaluate",
        "diagnose": "diagnose",
        "select": "select",
    }
    return words.get(key[0], "train")


class Order(NamedTuple):
    """One run's part of an exchange.

    Several runs (seeds of one experiment) may go through an exchange together.
    """

    run: int
    sent: Groups
    cohort: tuple[int, ...]
    key: Key  # (seed, round, phase, step): with the client's number it decides every random draw

    @property
    def purpose(self) -> Purpose:
        """The purpose that the key states."""
        return purpose_of(self.key)


class Reply(NamedTuple):
    """The clients that answered, in the order of the cohort, and their gathered uploads."""

    clients: tuple[int, ...]
    collected: Groups
    # (clients that took part, clients needed) if too few did and nothing could be gathered
    short: tuple[int, int] | None = None
    # bytes of all uploads if they were compressed; None: those of the tensors in `collected`
    uploaded: int | None = None


class Engine(Protocol):
    """Performs exchanges and keeps the clients' memos between them."""

    # True if clients compute elsewhere: their memos stay there, and they may bring their own data
    remote: ClassVar[bool]

    def sizes(self, run: int, source: Source = "train") -> Sequence[int]:
        """Return the number of examples of each client."""

    def weights(self, run: int, source: Source = "train") -> Sequence[int]:
        """Return n_k, the weight of each client in means: how many examples or tokens count."""

    def exchange(self, exchange: Exchange, orders: Sequence[Order]) -> list[Reply]:
        """Send, compute at the clients, gather: return one reply for each order."""

    def memos_of(self, run: int) -> Mapping[int, Groups]:
        """Return the memos that the clients of a run hold now, without empty ones.

        A client that is not named holds the memo it began with, or nothing.
        """

    def restore(self, run: int, memos: Mapping[int, Groups]) -> None:
        """Replace all memos of a run; clients that are not named hold what they began with."""

    def facts(self) -> dict[str, Any]:
        """Return the engine's own decisions so far, for the record."""

    def adopt(self, facts: Mapping[str, Any]) -> None:
        """Repeat recorded decisions: a resumed run must compute in the same way."""

    def close(self) -> None:
        """Release everything that the engine holds."""


# (model, federations, first memos of each run, dtype, **options)
EngineFactory = Callable[..., Engine]
