"""The engine whose clients are on Flower nodes.

One exchange sends one message to every client of the cohort and waits for the replies until a
deadline. A client that raises, disappears, is late or sends something wrong has not answered; the
log says which client and why. The tensors that a client keeps (its teacher, its private tensors)
stay on the node under a tag, and every request names the tag that the client should hold. So the
server notices a node that was restarted, and a reply that came too late has no effect.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from feddkd.data.batches import Source
from feddkd.data.federation import SERVER, Federation
from feddkd.engines.client import gather, retained
from feddkd.engines.interface import Order, Reply
from feddkd.engines.serial import Serial
from feddkd.errors import InputError
from feddkd.flower.expected import log_no_answer, tried
from feddkd.flower.held_tensors import HeldTensors
from feddkd.flower.membership import AnyMember, Membership
from feddkd.flower.messages import (
    ExchangeReply,
    ExchangeRequest,
    FederationFacts,
    NodeRequest,
)
from feddkd.flower.roster import MOST_EXAMPLES, Roster
from feddkd.flower.sent_experiment import to_send
from feddkd.flower.status import Status
from feddkd.flower.transport import (
    BlamelessError,
    Outgoing,
    Transport,
    action,
    bytes_in,
    json_in,
    message_record,
    tensor_record,
)
from feddkd.flower.upload_bounds import believable
from feddkd.flower.wire import MOST, WireError, check, pack, printable, unpack
from feddkd.method import Exchange
from feddkd.method.compression import opened, problem_in
from feddkd.models.functional import Model
from feddkd.tensors import Groups, bytes_of, stack
from feddkd.trees import first_tensor


class NodeAnswer(NamedTuple):
    """An upload, and the tag of the tensors that its client holds now."""

    upload: Groups
    held: str
    size: int  # bytes of the tensors that travelled


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
    start_with: int | None = None  # clients that must have joined for the run to start; None: all
    most_examples: int = MOST_EXAMPLES  # that a client may claim
    membership: Membership = field(default_factory=AnyMember)
    status: Status = field(default_factory=Status)

    def __post_init__(self) -> None:
        if self.grid is None:
            raise InputError(
                "engine 'flower' runs inside a federation: feddkd flower up FILE.toml starts one on"
                " this machine"
            )
        if len(self.federations) != 1:
            raise InputError("engine 'flower' takes one run at a time")
        (federation,) = self.federations
        shape = tuple(first_tensor(federation.x).shape[1:])
        facts = FederationFacts(shape, federation.classes, federation.transform.scale)
        self._base = to_send(self.experiment), facts  # of every request
        self._server = Serial(self.model, self.federations, self.first_memos, self.dtype)
        self._transport = Transport(self.grid, self.membership, self.poll)
        self._roster = Roster(
            self._transport,
            len(federation.train),
            self.membership,
            lambda: RecordDict({"page": message_record(NodeRequest(*self._base))}),
            self.most_examples,
            math.prod(first_tensor(federation.y).shape[1:]),
        )
        self._held = HeldTensors(self.first_memos[0])
        name, rounds = self.experiment.get("name", ""), int(self.experiment.get("rounds", 0))
        self.status.begin(name or self.experiment.get("method", ""), rounds, self._roster.total)

    # --- the protocol of engines

    def sizes(self, run: int, source: Source = "train") -> Sequence[int]:
        """Return the number of examples of each client."""
        self._gather_clients()
        counts = self._roster.counts  # nothing of clients that have not joined
        return [counts.get(client, {}).get(source, 0) for client in range(self._roster.total)]

    def weights(self, run: int, source: Source = "train") -> Sequence[int]:
        """Return the weight of each client in means."""
        self._gather_clients()
        return [self._weight(client, source) for client in range(self._roster.total)]

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
        return self._held.facts()

    def adopt(self, facts: Mapping[str, Any]) -> None:
        """Take the tags of a checkpoint, also in the middle of a run."""
        self._held.adopt(facts)

    def close(self) -> None:
        """Free the server's own engine."""
        self._server.close()

    def exchange(self, exchange: Exchange, orders: Sequence[Order]) -> list[Reply]:
        """Perform one exchange: send the requests, check the replies, gather the uploads."""
        if all(order.cohort == (SERVER,) for order in orders):
            return self._server.exchange(exchange, orders)
        self._gather_clients()
        self._held.begin_round(orders[0])
        self.status.begin_exchange(exchange, self._held.round)
        pattern = self._pattern(exchange, orders[0])
        answers: list[dict[int, NodeAnswer]] = [{} for _ in orders]
        outgoing = list(self._outgoing(exchange, orders))
        late = {(message.order, message.client): message for message in outgoing}
        for asked, message in self._transport.send(outgoing, self.deadline):
            late.pop((asked.order, asked.client), None)
            try:
                received = self._received(exchange, orders[asked.order], asked, message, pattern)
            except Exception as error:  # whatever a node sends, it is that node's fault
                self._blame(exchange, orders[asked.order], asked.client, error)
            else:
                answers[asked.order][asked.client] = received
        for silent in late.values():
            self._roster.conduct.failed(silent.node, self._held.round)
            self.status.failed(silent.client, "it has not answered in time")
        replies = [
            self._reply(exchange, order, self._believed(exchange, order, by_client))
            for order, by_client in zip(orders, answers, strict=True)
        ]
        self.status.write()
        if exchange.retain is not None:
            replies = self._unless_nobody(replies)
        if exchange.phase.codec is None:
            return replies
        return [
            reply._replace(uploaded=sum(by_client[client].size for client in reply.clients))
            for reply, by_client in zip(replies, answers, strict=True)
        ]

    # --- one exchange

    def _outgoing(self, exchange: Exchange, orders: Sequence[Order]) -> Iterator[Outgoing]:
        """Yield the messages to the clients whose nodes are online."""
        online = self._transport.online_nodes()
        training = f"train.{action(exchange.phase.name)}"
        for number, order in enumerate(orders):
            packed = pack(order.sent)
            tensors = tensor_record(packed)
            kind = "evaluate" if order.purpose == "evaluate" else training
            for client in order.cohort:
                node = self._roster.nodes.get(client)
                if node is None:
                    log_no_answer(client, exchange, order, "it has not joined")
                elif self._roster.conduct.is_aside(node, self._held.round):
                    log_no_answer(client, exchange, order, "its node is put aside for a while")
                elif node in online:
                    request = message_record(self._request(exchange, order, client))
                    content = RecordDict({"page": request, "tensors": tensors})
                    self.status.sent(client, len(packed))
                    yield Outgoing(node, client, number, kind, content)
                else:
                    log_no_answer(client, exchange, order, "its node is offline")

    def _request(self, exchange: Exchange, order: Order, client: int) -> ExchangeRequest:
        expects, before = self._held.of(client)
        return ExchangeRequest(
            *self._base,
            client=client,
            key=order.key,
            phase=exchange.phase.name,
            expects=expects,
            before=before,
            retain=None if exchange.retain is None else tuple(sorted(exchange.retain)),
        )

    def _received(
        self,
        exchange: Exchange,
        order: Order,
        asked: Outgoing,
        message: Message,
        pattern: Groups,
    ) -> NodeAnswer:
        """Return a client's answer, uncompressed, if it passes the checks of its form."""
        reply = ExchangeReply.read(json_in(message))
        training = exchange.retain is not None  # evaluation changes nothing
        if reply.lost:
            if training:
                self._held.tags.pop(asked.client, None)
            raise BlamelessError(
                "it has lost what it kept (was its node restarted?); it misses this round and"
                " starts from the beginning in the next"
            )
        if reply.bad_shares:
            self._note_complaint(asked.client, reply.bad_shares)
            raise BlamelessError(f"it cannot open the shares of clients {sorted(reply.bad_shares)}")
        content = bytes_in(message.content)
        # an evaluation may answer with a loss that is not finite
        upload = check(unpack(content, self.most), pattern, finite=training)
        if problem := problem_in(exchange.phase, upload, order.sent):
            raise WireError(problem)
        self.status.answered(asked.client, len(content))
        whole = opened(exchange.phase, upload, order.sent)
        return NodeAnswer(whole, str(reply.held), bytes_of(upload))

    def _note_complaint(self, client: int, dealers: Sequence[int]) -> None:
        """Note that a client cannot open the shares of others; only `Secure` sends shares."""

    def _believed(
        self, exchange: Exchange, order: Order, answers: Mapping[int, NodeAnswer]
    ) -> dict[int, Groups]:
        """Return the uploads that are within bounds; only the tags of their clients count."""
        uploads = {client: each.upload for client, each in answers.items()}
        if exchange.retain is None or not answers:
            return uploads
        uploads, refused = believable(uploads, order.sent, exchange.phase.clip)
        for client, error in refused.items():
            self._blame(exchange, order, client, error)
        for client in uploads:
            self._held.tags[client] = answers[client].held
            self._roster.conduct.did_well(self._roster.nodes[client])
        return uploads

    def _blame(self, exchange: Exchange, order: Order, client: int, error: Exception) -> None:
        """Log that a client has not answered and why; count it unless it is not its fault."""
        log_no_answer(client, exchange, order, error)
        self.status.failed(client, printable(error))
        if not isinstance(error, BlamelessError):
            self._roster.conduct.failed(self._roster.nodes[client], self._held.round)

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
        weights = [self._weight(client, exchange.phase.reads.source) for client in clients]
        return Reply(clients, gather(exchange.phase, stacked, weights))

    def _unless_nobody(self, replies: list[Reply]) -> list[Reply]:
        """Return the replies; if they hold no client, they end the round as too few clients do, or
        the run, if no node is left that has not failed in this round.
        """
        if any(reply.clients for reply in replies):
            return replies
        online, failed = self._transport.online_nodes(), self._roster.conduct.has_failed
        left = any(
            node in online and not failed(node, self._held.round)
            for node in self._roster.nodes.values()
        )
        return [reply._replace(short=(0, self._fewest) if left else None) for reply in replies]

    def _pattern(self, exchange: Exchange, order: Order) -> Groups:
        """Return groups with the names, shapes and types of an upload."""
        upload, memo = tried(
            self.model, exchange.phase, order.sent, self._held.like, self.federations[0], self.dtype
        )
        if exchange.retain is not None:
            self._held.like = retained(memo, exchange.retain)
        return upload

    # --- joining

    def _gather_clients(self) -> None:
        """Wait until enough clients have joined; later, take in those that come."""
        roster = self._roster
        enough = roster.total if self.start_with is None else min(self.start_with, roster.total)
        if len(roster.nodes) < enough:
            joined = roster.gather(enough, self.join, self.poll)
        else:
            joined = roster.welcome(self.join)
        if joined:
            self.status.joined(joined, {k: roster.name_of(k) for k in joined})
        self._held.note_joined(joined)

    def _weight(self, client: int, source: Source) -> int:
        """Return the weight of a client in means."""
        return self._roster.weights.get(client, {}).get(source, 0)

    @property
    def _fewest(self) -> int:
        """The number of clients that an exchange needs."""
        return 1
