"""The clients of a federation: which node stands for each, and how many examples it has.

Nodes are asked when they come online which clients they have, and again while they have not joined:
a message may be lost, and an operator may repair a node. They may come late: a run starts when
enough clients are there, and the others take part from then on.
"""

import logging
import time
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flwr.app import Message, RecordDict

from feddkd.data.batches import Source
from feddkd.errors import InputError
from feddkd.flower.conduct import Conduct
from feddkd.flower.membership import Membership
from feddkd.flower.messages import ClientInfo, NodeInfo
from feddkd.flower.transport import Outgoing, Transport, json_in
from feddkd.flower.wire import WireError, printable

log = logging.getLogger(__name__)
NEWS = 10.0  # seconds between two lines that say who is lacking
AGAIN = 30.0  # seconds until a node that has not joined is asked again
SOURCES = frozenset(typing.get_args(Source))
MOST_EXAMPLES = 10_000_000  # the default limit of the examples that a client may claim


@dataclass
class Roster:
    """The clients 0 to `total` - 1 and their nodes."""

    transport: Transport
    total: int
    membership: Membership
    content: Callable[[], RecordDict]  # the question to a node
    most_examples: int = MOST_EXAMPLES
    most_positions: int = 1  # that may count in one example, such as its tokens
    nodes: dict[int, int] = field(default_factory=dict)  # client -> Flower's number of its node
    # client -> source -> number of examples
    counts: dict[int, Mapping[str, int]] = field(default_factory=dict)
    weights: dict[int, Mapping[str, int]] = field(default_factory=dict)  # in means, likewise
    conduct: Conduct = field(default_factory=Conduct)
    _asked: dict[int, float] = field(default_factory=dict)  # node -> when
    _waiting: dict[str, Outgoing] = field(default_factory=dict)
    _refused: dict[int, str] = field(default_factory=dict)  # node -> why

    @property
    def missing(self) -> list[int]:
        """The clients that have not joined."""
        return [client for client in range(self.total) if client not in self.nodes]

    def gather(self, enough: int, seconds: float, poll: float) -> dict[int, ClientInfo]:
        """Return the clients that have joined as soon as there are enough.

        Raise InputError if there are not enough in time. Say every ten seconds who is lacking.
        """
        begun, said, joined = time.monotonic(), time.monotonic(), dict[int, ClientInfo]()
        while len(self.nodes) < enough:
            joined |= self.welcome(seconds)
            if len(self.nodes) >= enough:
                break
            now = time.monotonic()
            if now - begun > seconds:
                raise InputError(
                    f"clients {self.missing} have not joined within {seconds:g} s{self._reasons}"
                )
            if now - said > NEWS:
                said = now
                log.info(
                    "%s of %s clients have joined; %s are lacking%s",
                    len(self.nodes),
                    self.total,
                    self.missing,
                    self._reasons,
                )
            time.sleep(poll)
        return joined

    def welcome(self, seconds: float) -> dict[int, ClientInfo]:
        """Ask the nodes that have not joined, and return the clients of those that have answered.

        It does not wait: a node that does not answer delays no other.
        """
        if not self.missing:
            return {}
        now, absent = time.monotonic(), self.transport.online_nodes() - set(self.nodes.values())
        new = [node for node in absent if now - self._asked.get(node, -AGAIN) >= AGAIN]
        self._asked |= dict.fromkeys(new, now)
        outgoing = [Outgoing(node, -1, 0, "query.info", self.content()) for node in sorted(new)]
        self._waiting |= self.transport.push(outgoing, seconds)
        joined: dict[int, ClientInfo] = {}
        for asked, message in self.transport.arrived(self._waiting):
            if asked.node not in self.nodes.values():
                joined |= self._answered(asked.node, message)
        return joined

    def _answered(self, node: int, message: Message) -> Mapping[int, ClientInfo]:
        """Add the clients of a node that has answered; log why if they cannot join."""
        try:
            return self._add(node, NodeInfo.read(json_in(message)))
        except Exception as error:  # whatever a node sends, it is that node's fault
            why = printable(error)
            if self._refused.get(node) != why:
                log.warning("node %s cannot join: %s", self._name(node), why)
            self._refused[node] = why
            return {}

    def _add(self, node: int, info: NodeInfo) -> Mapping[int, ClientInfo]:
        """Add the clients of a node, all or none."""
        for client, found in info.clients.items():
            self._check(node, client, found)
        for client, found in info.clients.items():
            self.nodes[client] = node
            self.counts[client] = found.counts
            self.weights[client] = found.counts if found.weights is None else found.weights
            self.membership.bind(client, node)
            log.info("client %s has joined (%s)", client, self._name(node))
        self._refused.pop(node, None)
        return info.clients

    def _check(self, node: int, client: int, found: ClientInfo) -> None:
        """Raise WireError if a node must not stand for a client, or its counts are no counts."""
        if client >= self.total:
            raise WireError(
                f"it has client {client}, but the experiment has clients 0 to {self.total - 1}"
            )
        self.membership.check(client, node)
        if self.nodes.get(client, node) != node:
            raise WireError(
                f"client {client} is already that of another node; every node needs a different"
                " --part (partition-id)"
            )
        if set(found.counts) != SOURCES:
            raise WireError(f"it must say how many examples it has of {sorted(SOURCES)}")
        for source, count in found.counts.items():
            if not 0 <= count <= self.most_examples:
                raise WireError(
                    f"client {client} claims a number of {source} examples that is not between 0"
                    f" and {self.most_examples:,}"
                )
        for source, weight in (found.weights or {}).items():
            most = found.counts.get(source, 0) * self.most_positions
            if not 0 <= weight <= most:
                raise WireError(
                    f"client {client} claims a weight of its {source} examples that is not between"
                    f" 0 and {most:,}"
                )
        if not found.counts["train"]:
            raise WireError(f"client {client} has no training examples")

    def name_of(self, client: int) -> str:
        """Return the name of the node of a client that has joined."""
        return self._name(self.nodes[client])

    def _name(self, node: int) -> str:
        return self.membership.name(node) or str(node)

    @property
    def _reasons(self) -> str:
        return "".join(f"; {self._name(node)}: {why}" for node, why in self._refused.items())
