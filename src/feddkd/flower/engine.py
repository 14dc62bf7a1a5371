"""The engine whose clients are on Flower nodes.

One exchange sends one message to every client of the cohort and waits for the replies until a
deadline. A client that raises, disappears, is late or sends something wrong has not answered; the
log says which client and why. The tensors that a client keeps (its teacher, its private tensors)
stay on the node under a tag, and every request names the tag that the client should hold. So the
server notices a node that was restarted, and a reply that came too late has no effect.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from feddkd.data.batches import Source
from feddkd.data.federation import SERVER, Federation
from feddkd.engines.client import answer, gather, retained, seeded
from feddkd.engines.interface import Order, Reply
from feddkd.engines.serial import Serial
from feddkd.errors import InputError
from feddkd.flower.messages import (
    ExchangeReply,
    ExchangeRequest,
    FederationFacts,
    NodeInfo,
    NodeRequest,
)
from feddkd.flower.sent_experiment import to_send
from feddkd.flower.transport import (
    Outgoing,
    Transport,
    action,
    bytes_in,
    json_in,
    message_record,
    tensor_record,
)
from feddkd.flower.wire import FIRST, MOST, NOTHING, WireError, check, pack, unpack
from feddkd.method import Exchange
from feddkd.models.functional import Model
from feddkd.tensors import Groups, stack
from feddkd.trees import first_tensor

log = logging.getLogger(__name__)


@dataclass
class Flower:
    """An engine over the nodes behind a Grid; it computes the server's own exchanges itself."""

    remote: ClassVar[bool] = True
    model: Model
    federations: Sequence[Federation]
    first_memos: Sequence[Groups]
    dtype: torch.dtype = torch.float32
    grid: Grid | None = None
    experiment: Mapping[str, Any] = field(default_factory=dict)  # the keys of its TOML file
    deadline: float = 600.0  # seconds for an exchange
    join: float = 120.0  # seconds until all clients must have joined
    poll: float = 0.1  # seconds between two polls for replies
    most: int = MOST  # bytes of a reply's tensors
    held: dict[int, str] = field(default_factory=dict)  # client -> tag of the tensors it keeps
    _nodes: dict[int, int] = field(default_factory=dict)  # client -> Flower's number of its node
    # client -> source -> number of examples
    _counts: dict[int, Mapping[str, int]] = field(default_factory=dict)
    # client -> source -> weight in means
    _weights: dict[int, Mapping[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.grid is None:
            raise InputError(
                "engine 'flower' runs inside a federation: feddkd flower up FILE.toml starts one on"
                " this machine"
            )
        if len(self.federations) != 1:
            raise InputError("engine 'flower' takes one run at a time")
        self._sent = to_send(self.experiment)
        self._server = Serial(self.model, self.federations, self.first_memos, self.dtype)
        self._transport = Transport(self.grid, self.poll)
        self._round: str | int = 0
        # stands for every client's memo: it has the same names, shapes and types
        self._memo = self.first_memos[0]
        self._before = (self._memo, self.held)  # both at the beginning of the round

    # --- the protocol of engines

    def sizes(self, run: int, source: Source = "train") -> Sequence[int]:
        """Return the number of examples of each client."""
        self._gather_clients()
        return [self._counts[client][source] for client in range(len(self._counts))]

    def weights(self, run: int, source: Source = "train") -> Sequence[int]:
        """Return the weight of each client in means."""
        self._gather_clients()
        return [self._weights[client][source] for client in range(len(self._weights))]

    def memos_of(self, run: int) -> Mapping[int, Groups]:
        """Return nothing: clients keep their memos on their nodes."""
        return {}

    def restore(self, run: int, memos: Mapping[int, Groups]) -> None:
        """Raise InputError if a checkpoint holds memos: this engine cannot send them to nodes."""
        if memos:
            raise InputError(
                "cannot resume this run on Flower nodes: its checkpoint holds its clients' tensors,"
                " and on Flower each node keeps them itself"
            )

    def facts(self) -> dict[str, Any]:
        """Return the tags that clients hold, for the checkpoint."""
        return {"held": {str(client): tag for client, tag in self.held.items()}}

    def adopt(self, facts: Mapping[str, Any]) -> None:
        """Take the tags of a checkpoint, also in the middle of a run.

        The round is then played again from the tensors that clients held when it began.
        """
        self.held = {int(client): str(tag) for client, tag in facts.get("held", {}).items()}
        self._round, self._memo = 0, self._before[0]

    def close(self) -> None:
        """Free the server's own engine."""
        self._server.close()

    def exchange(self, exchange: Exchange, orders: Sequence[Order]) -> list[Reply]:
        """Perform one exchange: send the requests, check the replies, gather the uploads."""
        if all(order.cohort == (SERVER,) for order in orders):
            return self._server.exchange(exchange, orders)
        self._gather_clients()
        self._begin_round(orders[0])
        pattern = self._pattern(exchange, orders[0])
        uploads: list[dict[int, Groups]] = [{} for _ in orders]
        outgoing = list(self._outgoing(exchange, orders))
        for asked, message in self._transport.send(outgoing, self.deadline):
            try:
                upload = self._upload(exchange, asked.client, message, pattern)
            except WireError as error:
                _log_no_answer(asked.client, exchange, orders[asked.order], str(error))
            else:
                uploads[asked.order][asked.client] = upload
        return [
            self._reply(exchange, order, by_client)
            for order, by_client in zip(orders, uploads, strict=True)
        ]

    # --- one exchange

    def _begin_round(self, order: Order) -> None:
        """Store the state at the beginning of a round.

        Where clients keep nothing between rounds, the tags of the last round count no more.
        """
        if order.purpose == "train" and order.key[1] != self._round:
            self._round = order.key[1]
            if not self._memo:
                self.held = dict.fromkeys(self.held, NOTHING)
            self._before = (self._memo, dict(self.held))

    def _outgoing(self, exchange: Exchange, orders: Sequence[Order]) -> Iterator[Outgoing]:
        """Yield the messages to the clients whose nodes are online."""
        online = self._transport.online_nodes()
        training = f"train.{action(exchange.phase.name)}"
        for number, order in enumerate(orders):
            tensors = tensor_record(pack(order.sent))
            kind = "evaluate" if order.purpose == "evaluate" else training
            for client in order.cohort:
                node = self._nodes[client]
                if node in online:
                    request = message_record(self._request(exchange, order, client))
                    content = RecordDict({"page": request, "tensors": tensors})
                    yield Outgoing(node, client, number, kind, content)
                else:
                    _log_no_answer(client, exchange, order, "its node is offline")

    def _request(self, exchange: Exchange, order: Order, client: int) -> ExchangeRequest:
        return ExchangeRequest(
            self._sent,
            self._federation_facts,
            client=client,
            key=order.key,
            phase=exchange.phase.name,
            expects=self.held.get(client, FIRST),
            before=self._before[1].get(client, FIRST),
            retain=None if exchange.retain is None else tuple(sorted(exchange.retain)),
        )

    @property
    def _federation_facts(self) -> FederationFacts:
        federation = self.federations[0]
        shape = tuple(first_tensor(federation.x).shape[1:])
        return FederationFacts(shape, federation.classes, federation.transform.scale)

    def _upload(self, exchange: Exchange, client: int, message: Message, pattern: Groups) -> Groups:
        """Return a client's upload if it passes the checks; only then its new tag counts."""
        reply = ExchangeReply.read(json_in(message))
        training = exchange.retain is not None  # evaluation changes nothing
        if reply.lost:
            if training:
                self.held.pop(client, None)
            raise WireError(
                "it has lost what it kept (was its node restarted?); it misses this round and"
                " starts from the beginning in the next"
            )
        upload = unpack(bytes_in(message.content), self.most)
        # an evaluation may answer with a loss that is not finite
        upload = check(upload, pattern, finite=training)
        if training:
            self.held[client] = str(reply.held)
        return upload

    def _reply(self, exchange: Exchange, order: Order, uploads: Mapping[int, Groups]) -> Reply:
        """Gather the uploads as the phase says."""
        clients = tuple(client for client in order.cohort if client in uploads)
        if not clients:
            return Reply((), {})
        device = self.federations[0].device
        stacked: dict[str, dict[str, torch.Tensor]] = {}
        for group in uploads[clients[0]]:
            tensors = stack([uploads[client][group] for client in clients])
            stacked[group] = {name: tensor.to(device) for name, tensor in tensors.items()}
        weights = [self._weights[client][exchange.phase.reads.source] for client in clients]
        return Reply(clients, gather(exchange.phase, stacked, weights))

    def _pattern(self, exchange: Exchange, order: Order) -> Groups:
        """Return groups with the names, shapes and types of an upload.

        They are the upload of a client with four examples that does one step here.
        """
        federation = self.federations[0]
        four = np.resize(federation.test, 4)
        small = replace(federation, train=(four,), own_test=None, validation=four, test=four)
        phase = replace(exchange.phase, reads=replace(exchange.phase.reads, steps=1))
        key = ("pattern", 1, 0, 1, 0)
        with seeded(key, federation.device):
            upload, memo = answer(
                self.model, phase, order.sent, self._memo, small, 0, key, self.dtype
            )
        if exchange.retain is not None:
            self._memo = retained(memo, exchange.retain)
        return upload

    # --- joining

    def _gather_clients(self) -> None:
        """Ask every node, once, which clients it has and how many examples they have."""
        if self._counts:
            return
        wanted, end = set(range(len(self.federations[0].train))), time.monotonic() + self.join
        asked, reasons = set[int](), dict[int, str]()
        while missing := wanted - set(self._nodes):
            seconds_left = end - time.monotonic()
            if seconds_left < 0:
                why = "".join(f"; node {node}: {reason}" for node, reason in reasons.items())
                raise InputError(
                    f"clients {sorted(missing)} have not joined within {self.join:g} s{why}"
                )
            new = self._transport.online_nodes() - asked
            asked |= new
            self._ask_for_clients(new, reasons, seconds_left)
            time.sleep(self.poll)

    def _ask_for_clients(self, nodes: set[int], reasons: dict[int, str], seconds: float) -> None:
        """Add the clients of these nodes; `reasons` gets the reason why a node is refused."""
        request = NodeRequest(self._sent, self._federation_facts)
        content = RecordDict({"page": message_record(request)})
        outgoing = [Outgoing(node, -1, 0, "query.info", content) for node in sorted(nodes)]
        for asked, message in self._transport.send(outgoing, seconds):
            try:
                self._add_node(asked.node, NodeInfo.read(json_in(message)))
            except WireError as error:
                reasons[asked.node] = str(error)

    def _add_node(self, node: int, info: NodeInfo) -> None:
        total = len(self.federations[0].train)
        for client, found in info.clients.items():
            if client >= total:
                raise WireError(
                    f"it has client {client}, but the experiment has clients 0 to {total - 1}"
                )
            if self._nodes.get(client, node) != node:
                raise InputError(
                    f"two nodes have client {client}; every node needs a different partition-id"
                )
            self._nodes[client] = node
            self._counts[client] = found.counts
            self._weights[client] = found.counts if found.weights is None else found.weights
            if self.held.get(client, FIRST) not in (FIRST, *found.held):
                log.warning("client %s has lost what it kept; it starts from the beginning", client)
                del self.held[client]


def _log_no_answer(client: int, exchange: Exchange, order: Order, why: str) -> None:
    log.warning(
        "client %s has not answered phase %r, key %s: %s",
        client,
        exchange.phase.name,
        (*order.key, client),
        why,
    )
