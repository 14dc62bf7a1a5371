"""The tensors that clients keep on their nodes, which the server knows by tags."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from feddkd.engines.interface import Order
from feddkd.flower.messages import ClientInfo
from feddkd.flower.wire import FIRST, NOTHING
from feddkd.tensors import Groups

log = logging.getLogger(__name__)


@dataclass
class HeldTensors:
    """The tag of the tensors that each client holds now and held when the round began."""

    like: Groups  # stands for every client's memo: it has the same names, shapes and types
    tags: dict[int, str] = field(default_factory=dict)  # by client
    round: int = 0

    def __post_init__(self) -> None:
        self._before = (self.like, self.tags)  # both at the beginning of the round

    def begin_round(self, order: Order) -> None:
        """Store the state at the beginning of a round.

        Where clients keep nothing between rounds, the tags of the last round count no more.
        """
        if order.purpose == "train" and order.key[1] != self.round:
            self.round = int(order.key[1])
            if not self.like:
                self.tags = dict.fromkeys(self.tags, NOTHING)
            self._before = (self.like, dict(self.tags))

    def of(self, client: int) -> tuple[str, str]:
        """Return the tag that a client should hold, and the one that it held before the round."""
        return self.tags.get(client, FIRST), self._before[1].get(client, FIRST)

    def facts(self) -> dict[str, Any]:
        """Return the tags for a checkpoint."""
        return {"held": {str(client): tag for client, tag in self.tags.items()}}

    def adopt(self, facts: Mapping[str, Any]) -> None:
        """Take the tags of a checkpoint, also in the middle of a run.

        The round is then played again from the tensors that clients held when it began.
        """
        self.tags = {int(client): str(tag) for client, tag in facts.get("held", {}).items()}
        self.round, self.like = 0, self._before[0]

    def note_joined(self, joined: Mapping[int, ClientInfo]) -> None:
        """Forget the tags that clients who join do not hold any more."""
        for client, found in joined.items():
            if self.tags.get(client, FIRST) not in (FIRST, *found.held):
                log.warning("client %s has lost what it kept; it starts from the beginning", client)
                del self.tags[client]
