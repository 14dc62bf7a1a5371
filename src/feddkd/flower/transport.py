"""Sends messages to nodes over Flower's Grid and waits for the replies until a deadline.

On the wire a message is one record of JSON and, for an exchange, one record of tensors.
"""

import json
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid

from feddkd.flower.membership import Membership
from feddkd.flower.messages import WireMessage
from feddkd.flower.wire import NodeMemory, WireError

log = logging.getLogger(__name__)
MOST_JSON = 16 << 20  # characters
# Flower's codes of the errors that the SuperLink makes up
TOO_LATE, NODE_GONE = (3, 4), 5


class BlamelessError(WireError):
    """A node cannot answer, and that is not its fault."""


class Outgoing(NamedTuple):
    """A message to send to a node for one of its clients, because of an order to the engine."""

    node: int
    client: int
    order: int
    kind: str  # query.info, train.<phase>, evaluate
    content: RecordDict


@dataclass(frozen=True)
class Transport:
    """Sends messages to the nodes behind a Grid and collects their replies."""

    grid: Grid
    membership: Membership
    # seconds between two polls for replies; longer when the replies take long
    poll: float

    def online_nodes(self) -> set[int]:
        """Return Flower's numbers of the members' nodes that are online."""
        return {node for node in self.grid.get_node_ids() if self.membership.is_member(node)}

    def send(
        self, messages: Sequence[Outgoing], seconds: float
    ) -> Iterator[tuple[Outgoing, Message]]:
        """Send messages and yield each with its reply, until all have come or time is up.

        A reply is matched by the number of the message that it answers: replies that the SuperLink
        makes up for a lost node carry no node's number.
        """
        start = time.monotonic()
        waiting = self.push(messages, seconds)
        while waiting:
            yield from self.arrived(waiting)
            if waiting and time.monotonic() - start > seconds:
                late = sorted(message.client for message in waiting.values())
                log.warning("no answer within %g s from clients %s", seconds, late)
                return
            if waiting:
                time.sleep(max(self.poll, (time.monotonic() - start) / 20))

    def arrived(self, waiting: dict[str, Outgoing]) -> Iterator[tuple[Outgoing, Message]]:
        """Yield the messages whose replies have come, each with its reply, and remove them."""
        if not waiting:
            return
        for reply in self.grid.pull_messages(list(waiting)):
            message = waiting.pop(reply.metadata.reply_to_message_id, None)
            if message is not None:  # None: a second reply to the same message
                yield message, reply

    def push(self, messages: Sequence[Outgoing], seconds: float) -> dict[str, Outgoing]:
        """Hand the messages to the Grid and return them by the numbers that it gives them."""
        if not messages:
            return {}
        pushed = [
            Message(message.content, message.node, message.kind, ttl=seconds)
            for message in messages
        ]
        numbers = self.grid.push_messages(pushed)
        # a message that could not be sent has no number
        sent = {
            number: message for number, message in zip(numbers, messages, strict=False) if number
        }
        if len(sent) < len(messages):
            lost = len(messages) - len(sent)
            log.warning("%s of %s messages could not be sent", lost, len(messages))
        return sent


def action(name: str) -> str:
    """Return a phase's name with the characters that Flower allows in an action."""
    return re.sub(r"\W", "_", name)


def message_record(message: WireMessage) -> ConfigRecord:
    """Return a message as a record."""
    return json_record(message.as_json())


def json_record(content: Mapping[str, Any]) -> ConfigRecord:
    """Return a JSON object as a record."""
    return ConfigRecord({"json": json.dumps(content)})


def tensor_record(content: bytes) -> ConfigRecord:
    """Return packed tensors as a record.

    An ArrayRecord would be three objects, and Flower makes two requests on each side for every
    object.
    """
    return ConfigRecord({"groups": content})


def json_in(message: Message) -> Any:
    """Return the JSON of a message, or raise WireError if it has none or reports an error."""
    if message.has_error():
        code, reason = message.error.code, message.error.reason
        if code == NODE_GONE:
            raise BlamelessError("its node is gone")
        late = "it has not answered in time" if code in TOO_LATE else f"error {code}: {reason}"
        raise WireError(late)
    try:
        text = message.content.config_records["page"]["json"]
    except KeyError as error:
        raise WireError(f"the message has no JSON: {error!r}") from None
    if not isinstance(text, str) or len(text) > MOST_JSON:
        raise WireError(f"the JSON of a message is a text of at most {MOST_JSON:,} characters")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the message has no readable JSON: {error!r}") from None


def bytes_in(records: RecordDict, name: str = "tensors") -> bytes:
    """Return the packed tensors in a record, or raise WireError if it has none."""
    try:
        content = records.config_records[name]["groups"]
    except KeyError:
        raise WireError(f"the message has no record {name!r} with tensors") from None
    if not isinstance(content, bytes):
        raise WireError(f"the record {name!r} holds {type(content).__name__} instead of bytes")
    return content


def read_memory(context: Context) -> NodeMemory:
    """Return the tensors that a node keeps between messages; Flower's context holds them."""
    return {tag: bytes_in(context.state, tag) for tag in context.state.config_records}


def write_memory(context: Context, memory: NodeMemory) -> None:
    """Replace the tensors that a node keeps; unchanged ones are not written again."""
    # A tag alone does not identify its tensors: a round that is played again gives the same tags.
    before = read_memory(context)
    for tag in set(before) - set(memory):
        del context.state[tag]
    for tag, content in memory.items():
        if before.get(tag) != content:
            context.state[tag] = tensor_record(content)
