"""What goes over Flower's Grid:

a letter is a page of JSON and, mostly, tensors. Answers are waited for until a deadline.
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
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.superlink.grid.http_grid import HttpGrid

from feddkd.flower.wire import WireError

log = logging.getLogger(__name__)

Page = dict[str, Any]
SOON = 0.05  # seconds


class Letter(NamedTuple):
    """One message: to which node, for which client, in answer to which order."""

    node: int
    client: int
    order: int
    kind: str  # query.info, train.<phase>, evaluate
    content: RecordDict


@dataclass(frozen=True)
class Post:
    """Carries letters to nodes and brings the answers."""

    grid: Grid
    # seconds between two looks for answers, and a twentieth of the time that it takes already
    poll: float

    def online(self) -> set[int]:
        return set(self.grid.get_node_ids())

    def converse(
        self, letters: Sequence[Letter], seconds: float
    ) -> Iterator[tuple[Letter, Message]]:
        """Send, and yield the answers as they come, until all are there or time is up.

        An answer is told by the number of the message it replies to: those that the SuperLink makes
        up for a lost node carry no node's number.
        """
        begun = time.monotonic()
        messages = [
            Message(letter.content, letter.node, letter.kind, ttl=seconds) for letter in letters
        ]
        numbers = [*self.grid.push_messages(messages)] if messages else []
        waiting = {
            number: letter for number, letter in zip(numbers, letters, strict=False) if number
        }
        if len(waiting) < len(letters):
            log.warning(
                "%s of %s messages could not be sent", len(letters) - len(waiting), len(letters)
            )
        while waiting:
            for answer in self.grid.pull_messages(list(waiting)):
                letter = waiting.pop(answer.metadata.reply_to_message_id, None)
                if letter is not None:  # else it was there already: nothing counts twice
                    yield letter, answer
            if waiting and time.monotonic() - begun > seconds:
                late = sorted(letter.client for letter in waiting.values())
                log.warning("no answer within %g s from clients %s", seconds, late)
                return
            if waiting:
                time.sleep(max(self.poll, (time.monotonic() - begun) / 20))


def hasten() -> None:
    """A message often comes a moment before its content, and Flower asks again after a second: ask
    sooner, then ever later.
    """
    pull_objects.__kwdefaults__ = {**(pull_objects.__kwdefaults__ or {}), "initial_backoff": SOON}


def bound(grid: Grid, seconds: float) -> None:
    """A SuperLink that is gone ends the run: left to itself, Flower would knock for ever."""
    hasten()
    if isinstance(grid, HttpGrid):
        grid._retry_invoker.max_time = seconds


def action(name: str) -> str:
    """A phase's name as Flower wants actions: letters, digits, underscores."""
    return re.sub(r"\W", "_", name)


def page_record(page: Mapping[str, Any]) -> ConfigRecord:
    return ConfigRecord({"json": json.dumps(page)})


def tensor_record(content: bytes) -> ConfigRecord:
    """Not an ArrayRecord: that would be three objects, and every object costs Flower two requests
    on each side.
    """
    return ConfigRecord({"groups": content})


def page_of(message: Message) -> Page:
    if message.has_error():
        raise WireError(f"error {message.error.code}: {message.error.reason}")
    try:
        return dict(json.loads(str(message.content.config_records["page"]["json"])))
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"no page: {error!r}") from None


def bytes_in(records: RecordDict, name: str = "tensors") -> bytes:
    try:
        content = records.config_records[name]["groups"]
    except KeyError:
        raise WireError(f"no {name}") from None
    if not isinstance(content, bytes):
        raise WireError(f"{name} are no bytes")
    return content


class NodeStorage:
    """What a node keeps between messages, in Flower's context: {tag: groups as bytes}."""

    def __init__(self, context: Context) -> None:
        self._state = context.state

    def read(self) -> dict[str, bytes]:
        return {tag: bytes_in(self._state, tag) for tag in self._state.config_records}

    def write(self, kept: Mapping[str, bytes]) -> None:
        """Only what has changed; a round that is played again gives its tags anew."""
        there = self.read()
        for tag in set(there) - set(kept):
            del self._state[tag]
        for tag, content in kept.items():
            if there.get(tag) != content:
                self._state[tag] = tensor_record(content)
