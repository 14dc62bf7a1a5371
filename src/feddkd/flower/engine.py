"""Messages to Flower nodes: one exchange is one push and many pulls on Flower's Grid, with a
deadline.

A client that raises, vanishes, comes late or sends something else than it should has not answered;
the log says who and why. What a client keeps (its teacher, its private tensors) never comes here:
it stays with the node under a tag, and every order names the tag that counts. So a node that was
restarted is found out, and an answer that came too late has not happened.
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
    Letter,
    Page,
    Post,
    action,
    bytes_in,
    page_of,
    page_record,
    tensor_record,
)
from feddkd.flower.wire import FIRST, MOST, NOTHING, WireError, check, pack, unpack
from feddkd.method import Exchange
from feddkd.models.functional import Model
from feddkd.tensors import Groups, stack

log = logging.getLogger(__name__)


@dataclass
class Flower:
    """An engine over the nodes behind a Grid. What only the server holds, it works through itself."""

    remote: ClassVar[bool] = True
    model: Model
    federations: Sequence[Federation]
    first_memos: Sequence[Groups]
    dtype: torch.dtype = torch.float32
    grid: Grid | None = None
    # as it is spelled: what every node must know
    experiment: Mapping[str, Any] = field(default_factory=dict)
    deadline: float = 600.0  # seconds for an exchange
    join: float = 120.0  # seconds until all clients must be there
    poll: float = 0.1  # seconds between two looks for answers
    most: int = MOST  # bytes of an answer
    held: dict[int, str] = field(default_factory=dict)  # client -> tag of what it keeps
    _nodes: dict[int, int] = field(default_factory=dict)  # client -> Flower's number of its node
    # client -> source -> examples
    _counts: dict[int, Mapping[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.grid is None:
            raise InputError(
                "engine 'flower' runs inside a federation: feddkd flower up FILE.toml starts one on"
                " this machine"
            )
        if len(self.federations) != 1:
            raise InputError("engine 'flower' takes one run at a time")
        self._server = Serial(self.model, self.federations, self.first_memos, self.dtype)
        self._post = Post(self.grid, self.poll)
        self._round: str | int = 0
        # as a client's would look at present: for its names, shapes and types
        self._memo = self.first_memos[0]
        self._before = (self._memo, self.held)  # both as they were when the round began

    # --- what an engine is asked

    def sizes(self, run: int, source: Source = "train") -> Sequence[int]:
        self._gather_clients()
        return [self._counts[client][source] for client in range(len(self._counts))]

    def memos_of(self, run: int) -> Mapping[int, Groups]:
        return {}  # they are not the server's to have

    def restore(self, run: int, memos: Mapping[int, Groups]) -> None:
        if memos:
            raise InputError(
                "this run kept its clients' tensors at the server, and cannot go on where nodes"
                " keep them themselves"
            )

    def facts(self) -> dict[str, Any]:
        return {"held": {str(client): tag for client, tag in self.held.items()}}

    def adopt(self, facts: Mapping[str, Any]) -> None:
        """Also in the midst of a run: its round is then played again, from what its clients held
        when it began.
        """
        self.held = {int(client): str(tag) for client, tag in facts.get("held", {}).items()}
        self._round, self._memo = 0, self._before[0]

    def close(self) -> None:
        self._server.close()

    def exchange(self, exchange: Exchange, orders: Sequence[Order]) -> list[Reply]:
        if all(order.cohort == (SERVER,) for order in orders):
            return self._server.exchange(exchange, orders)
        self._gather_clients()
        self._begin_round(orders[0])
        pattern = self._pattern(exchange, orders[0])
        answers: list[dict[int, Groups]] = [{} for _ in orders]
        for letter, message in self._post.converse(
            list(self._letters(exchange, orders)), self.deadline
        ):
            try:
                answers[letter.order][letter.client] = self._take(
                    exchange, letter.client, message, pattern
                )
            except (WireError, KeyError, TypeError) as error:
                _tell(letter.client, exchange, orders[letter.order], str(error))
        return [
            self._reply(exchange, order, own) for order, own in zip(orders, answers, strict=True)
        ]

    # --- one exchange

    def _begin_round(self, order: Order) -> None:
        """Where clients keep nothing from round to round, whoever fell out of the last one has
        nothing to be asked for.
        """
        # else it is an evaluation
        if order.purpose == "train" and order.key[1] != self._round:
            self._round = order.key[1]
            if not self._memo:
                self.held = dict.fromkeys(self.held, NOTHING)
            self._before = (self._memo, dict(self.held))

    def _letters(self, exchange: Exchange, orders: Sequence[Order]) -> Iterator[Letter]:
        online = self._post.online()
        for number, order in enumerate(orders):
            tensors = tensor_record(pack(order.sent))
            kind = (
                "evaluate"
                if order.purpose == "evaluate"
                else f"train.{action(exchange.phase.name)}"
            )
            for client in order.cohort:
                node = self._nodes[client]
                if node in online:
                    page = page_record(self._page(exchange, order, client))
                    yield Letter(
                        node, client, number, kind, RecordDict({"page": page, "tensors": tensors})
                    )
                else:
                    _tell(client, exchange, order, "its node is not there")

    def _page(self, exchange: Exchange, order: Order, client: int) -> Page:
        retain = None if exchange.retain is None else sorted(exchange.retain)
        told: Page = {"client": client, "key": order.key, "phase": exchange.phase.name}
        tags = {
            "expects": self.held.get(client, FIRST),
            "before": self._before[1].get(client, FIRST),
        }
        return {**self._subject(), **told, **tags, "retain": retain}

    def _subject(self) -> Page:
        """The experiment, and what a node that brings its own data must know of the federation's."""
        own = self.federations[0]
        facts = {"shape": own.x.shape[1:], "classes": own.classes, "scale": own.transform.scale}
        return {"experiment": self.experiment, "facts": facts}

    def _take(self, exchange: Exchange, client: int, message: Message, pattern: Groups) -> Groups:
        """A client's upload, once it has passed the checks; only then does what it keeps count."""
        page = page_of(message)
        if page.get("lost"):
            if exchange.retain is not None:  # evaluation changes nothing
                self.held.pop(client, None)
            raise WireError(
                "it has lost what it kept (restarted?); it sits this round out and begins anew in"
                " the next"
            )
        upload = unpack(bytes_in(message.content), self.most)
        training = exchange.retain is not None
        # a loss that is no number is still the answer of an evaluation
        upload = check(upload, pattern, finite=training)
        if training:
            self.held[client] = str(page["held"])
        return upload

    def _reply(self, exchange: Exchange, order: Order, answers: Mapping[int, Groups]) -> Reply:
        clients = tuple(client for client in order.cohort if client in answers)
        if not clients:
            return Reply((), {})
        device = self.federations[0].x.device
        stacked = {
            group: stack([answers[client][group] for client in clients])
            for group in answers[clients[0]]
        }
        moved = {
            group: {name: tensor.to(device) for name, tensor in own.items()}
            for group, own in stacked.items()
        }
        examples = [self._counts[client][exchange.phase.reads.source] for client in clients]
        return Reply(clients, gather(exchange.phase, moved, examples))

    def _pattern(self, exchange: Exchange, order: Order) -> Groups:
        """What an upload should look like: that of a client made up here, with four examples and
        one step.
        """
        own = self.federations[0]
        four = np.resize(own.test, 4)
        made_up = replace(own, train=(four,), own_test=None, validation=four, test=four)
        phase, key = (
            replace(exchange.phase, reads=replace(exchange.phase.reads, steps=1)),
            ("pattern", 1, 0, 1, 0),
        )
        with seeded(key, own.x.device):
            upload, memo = answer(
                self.model, phase, order.sent, self._memo, made_up, 0, key, self.dtype
            )
        if exchange.retain is not None:
            self._memo = retained(memo, exchange.retain)
        return upload

    # --- who is there

    def _gather_clients(self) -> None:
        """Ask every node, once, which clients it stands for and how many examples these have."""
        if self._counts:
            return
        wanted, end = set(range(len(self.federations[0].train))), time.monotonic() + self.join
        asked, reasons = set[int](), dict[int, str]()
        while lacking := wanted - set(self._nodes):
            left = end - time.monotonic()
            if left < 0:
                told = "".join(f"; node {node}: {why}" for node, why in reasons.items())
                raise InputError(
                    f"clients {sorted(lacking)} have not joined within {self.join:g} s{told}"
                )
            new = self._post.online() - asked
            asked |= new
            self._ask_who(new, reasons, left)
            time.sleep(self.poll)

    def _ask_who(self, nodes: set[int], reasons: dict[int, str], seconds: float) -> None:
        content = RecordDict({"page": page_record(self._subject())})
        letters = [Letter(node, -1, 0, "query.info", content) for node in sorted(nodes)]
        for letter, message in self._post.converse(letters, seconds):
            try:
                self._enter(letter.node, page_of(message))
            except (WireError, KeyError, TypeError, AttributeError) as error:
                reasons[letter.node] = str(error)

    def _enter(self, node: int, page: Page) -> None:
        total = len(self.federations[0].train)
        for client, own in ((int(text), own) for text, own in page["clients"].items()):
            if not 0 <= client < total:
                raise WireError(
                    f"it stands for client {client}, and there are clients 0 to {total - 1}"
                )
            if self._nodes.get(client, node) != node:
                raise InputError(
                    f"two nodes stand for client {client}; every node needs a partition-id of"
                    " its own"
                )
            self._nodes[client] = node
            self._counts[client] = {
                str(source): int(count) for source, count in own["counts"].items()
            }
            if self.held.get(client, FIRST) not in (FIRST, *own["held"]):
                log.warning("client %s no longer holds what it kept; it begins anew", client)
                del self.held[client]


def _tell(client: int, exchange: Exchange, order: Order, why: str) -> None:
    log.warning(
        "client %s has not answered phase %r, key %s: %s",
        client,
        exchange.phase.name,
        (*order.key, client),
        why,
    )
