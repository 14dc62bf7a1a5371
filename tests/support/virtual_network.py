"""A network between a server and its nodes in one process, on a virtual clock, with faults by seed.

It is a Grid of Flower's: messages are serialised as Flower does it, and the nodes' apps are the
real ones. Each message is lost, delayed, sent twice or cut on its way; nodes crash and start again;
one node may lie; the server is cut off in the middle of anything. All of it follows from a seed.
"""

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from feddkd.flower.transport import tensor_record
from flower_double import through

GONE = 5  # Flower's code of the error for a node that is gone
NOTICED = 6.0  # seconds until the SuperLink takes a silent node for gone
Lie = Callable[["random.Random", Message, Message], Message | None]


class Cut(Exception):  # noqa: N818  # the server is killed; nothing went wrong
    """The server is killed here."""


@dataclass(frozen=True)
class Faults:
    """Rates of faults, as a share of messages, or of seconds for a node."""

    lost: float = 0.0
    slow: float = 0.0  # it takes up to twice the deadline
    twice: float = 0.0
    damaged: float = 0.0
    crash: float = 0.0  # of a node, when a message arrives at it
    lies: float = 0.0  # of the answers of the node that lies
    kills: int = 0  # of the server


@dataclass
class Clock:
    """Virtual time: nothing sleeps."""

    now: float = 0.0
    wake: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.wake()


@dataclass
class Network(Grid):
    """Nodes behind a network with faults."""

    seed: int
    app: ClientApp
    parts: int
    faults: Faults
    deadline: float
    lie: Lie
    clock: Clock = field(default_factory=Clock)
    liar: int | None = None
    lies_at_joining: bool = False
    secure: bool = False
    history: list[str] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.draw = random.Random(f"network {self.seed}")
        self.clock.wake = self.deliver_due
        self.partition = {7919 * (part + 3) % 9973: part for part in range(self.parts)}
        self.contexts = {node: self._context(node) for node in self.partition}
        self.up_again: dict[int, float] = {}  # node -> when it is there again
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self.arrived: dict[str, list[Message]] = {}
        self.era = 0  # how often the server was killed
        self.cuts = {self.draw.randrange(5, 120) for _ in range(self.faults.kills)}
        # called with every request that a node has answered without an error
        self.watch: Callable[[int, Message, Message], None] = lambda part, asked, reply: None

    def _context(self, node: int) -> Context:
        config: dict[str, Any] = {
            "partition-id": self.partition[node],
            "num-partitions": self.parts,
            "secure": self.secure,
        }
        return Context(
            run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={}
        )

    def note(self, what: str) -> None:
        self.history.append(f"{self.clock.now:8.2f} {what}")

    # --- what the server calls

    def get_node_ids(self) -> Iterable[int]:
        self._step()
        nodes = [node for node in self.partition if self._noticed(node)]
        self.draw.shuffle(nodes)
        return nodes

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        self._step()
        return [self._send(through(message)) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self._step()
        wanted = list(message_ids)
        found = [message for number in wanted for message in self.arrived.pop(number, ())]
        self.draw.shuffle(found)
        return found

    def _step(self) -> None:
        """Count what the server does; it is killed at some of these steps."""
        self.steps += 1
        if self.steps in self.cuts:
            self.note("the server is killed")
            raise Cut
        self.clock.now += 0.01
        self.deliver_due()

    def kill_server(self) -> None:
        """Forget what is on its way to the server; nodes may still do what they were asked."""
        self.era += 1
        self.arrived.clear()
        self.clock.now += self.draw.uniform(0, 2 * self.deadline)
        self.deliver_due()

    # --- on the way

    def _later(self, action: Callable[[], None]) -> None:
        delay = self.draw.expovariate(20 / self.deadline)
        if self.draw.random() < self.faults.slow:
            delay += self.draw.uniform(0, 2 * self.deadline)
        heapq.heappush(self.due, (self.clock.now + delay, len(self.history), action))
        self.history.append("")

    def deliver_due(self) -> None:
        while self.due and self.due[0][0] <= self.clock.now:
            heapq.heappop(self.due)[2]()

    def _send(self, message: Message) -> str:
        number, era = message.metadata.message_id, self.era
        kind, part = message.metadata.message_type, self.partition[message.metadata.dst_node_id]
        if self._happens(self.faults.lost):
            self.note(f"{kind} to {part} is lost")
            return number
        for _ in range(1 + self._happens(self.faults.twice)):
            self._later(lambda: self._arrive(message, era))
        return number

    def _arrive(self, message: Message, era: int) -> None:
        """Let a node answer a message that has arrived."""
        node, kind = message.metadata.dst_node_id, message.metadata.message_type
        part, number = self.partition[node], message.metadata.message_id
        if self._happens(self.faults.crash):
            self.up_again[node] = self.clock.now + self.draw.uniform(0, 3 * NOTICED)
            self.contexts[node] = self._context(node)
            self.note(f"node {part} crashes at {kind}")
        if self.clock.now < self.up_again.get(node, 0.0):
            if self._happens(0.5):
                gone = Message(Error(code=GONE, reason="gone"), reply_to=message)
                at = self.clock.now + NOTICED
                self._answer(at, number, through(gone), era)
            return
        try:
            reply = self.app(message, self.contexts[node])
        except Exception as error:
            self.note(f"node {part} cannot answer {kind}: {error}")
            reply = Message(Error(code=2, reason=f"{type(error)}:<'{error}'>"), reply_to=message)
        else:
            self.watch(part, message, reply)
        back: Message | None = through(reply)
        joining = kind == "query.info" and not self.lies_at_joining
        if part == self.liar and not joining and self._happens(self.faults.lies):
            assert back is not None
            back = self.lie(self.draw, message, back)
            self.note(f"node {part} lies about {kind}")
        if back is not None and self._happens(self.faults.damaged) and not back.has_error():
            self.note(f"the answer of {part} to {kind} is damaged")
            back = damaged(self.draw, back)
        if back is None or self._happens(self.faults.lost):
            self.note(f"the answer of {part} to {kind} is lost")
            return
        for _ in range(1 + self._happens(self.faults.twice)):
            self._answer(self.clock.now, number, back, era)

    def _answer(self, at: float, number: str, reply: Message, era: int) -> None:
        def come() -> None:
            if era == self.era:
                self.arrived.setdefault(number, []).append(reply)

        delay = self.draw.expovariate(20 / self.deadline)
        heapq.heappush(self.due, (at + delay, len(self.history), come))
        self.history.append("")

    def _happens(self, share: float) -> bool:
        return share > 0 and self.draw.random() < share

    def _noticed(self, node: int) -> bool:
        """Return whether the SuperLink takes a node for online."""
        up = self.up_again.get(node, 0.0)
        return self.clock.now >= up

    # --- what the server does not call

    def set_run(self, run: Any) -> None:
        pass

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *args: Any, **options: Any) -> Message:
        raise NotImplementedError

    def get_nodes(self) -> Iterable[Any]:
        raise NotImplementedError

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        raise NotImplementedError


def damaged(draw: random.Random, reply: Message) -> Message:
    """Return a reply whose bytes or whose JSON end too early, or begin with something else."""
    records = reply.content.config_records
    if "tensors" in records and draw.random() < 0.5:
        content = records["tensors"]["groups"]
        assert isinstance(content, bytes)
        cut = (
            content[: draw.randrange(len(content) + 1)]
            if draw.random() < 0.5
            else b"\xff" + content
        )
        reply.content["tensors"] = tensor_record(cut)
        return reply
    text = str(records["page"]["json"])
    reply.content["page"] = ConfigRecord({"json": text[: draw.randrange(len(text))]})
    return reply
