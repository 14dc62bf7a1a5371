"""Where clients compute. An engine performs one exchange and knows nothing else; nothing outside
knows where clients live.

Engine, device and chunking may change the speed of a run, never its numbers beyond rounding, so
they are no part of an experiment.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from feddkd.data.batches import Source
from feddkd.method import Exchange
from feddkd.randomness import Key
from feddkd.tensors import Groups


class Order(NamedTuple):
    """One run's share of an exchange.

    Several runs (seeds of one experiment) may go through an exchange together.
    """

    run: int
    sent: Groups
    cohort: tuple[int, ...]
    key: Key  # (seed, round, phase, step): with the client's number it decides every random draw


class Reply(NamedTuple):
    """Who answered, in the order of the cohort, and their uploads, gathered as the phase says."""

    clients: tuple[int, ...]
    collected: Groups
    # nothing could be gathered: so many gave what it takes, of at least so many
    short: tuple[int, int] | None = None


class Engine(Protocol):
    """Performs exchanges and holds the clients' memos in between."""

    # whether clients compute elsewhere: their memos never come here, and they may bring their own
    # examples
    remote: ClassVar[bool]

    def sizes(self, run: int, source: Source = "train") -> Sequence[int]:
        """n_k, the number of examples of each client."""

    def exchange(self, exchange: Exchange, orders: Sequence[Order]) -> list[Reply]:
        """Send, compute at the clients, gather: one reply for each order."""

    def memos_of(self, run: int) -> Mapping[int, Groups]:
        """What the clients of a run hold at present, as far as it is more than they began with."""

    def restore(self, run: int, memos: Mapping[int, Groups]) -> None:
        """Let the clients of a run hold this again and nothing else: whoever is not named, what it
        began with.
        """

    def facts(self) -> dict[str, Any]:
        """What the engine has decided along the way, for the record."""

    def adopt(self, facts: Mapping[str, Any]) -> None:
        """Decide so again: a run that goes on must not compute in another way."""

    def close(self) -> None:
        """Give back whatever the engine holds."""


# (model, federations, first memos of each run, dtype, **options)
EngineFactory = Callable[..., Engine]
