"""A Grid without processes: messages and contexts pass through Flower's own serialisation, apps run
here, one after another.

And the small experiments that are run over it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import context_from_proto, context_to_proto
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import load_file
from torch import Tensor

from feddkd.runs.record import find

LOCAL = "epochs=1, batch_size=32, lr=0.1"
METHODS = [
    f"fedavg({LOCAL})",
    f"fedbn({LOCAL})",
    f"scaffold({LOCAL})",
    f"fedgen({LOCAL}, generator_steps=2)",
]
DKD = "dkd(steps=2, batch_size=16, lr=0.3)"
FEDDKD = f"fedavg({LOCAL}) | {DKD}"
# a network with batch norm
NORM: dict[str, Any] = {"model": "emnist_cnn", "transform": "pad(pixels=10)"}
SETTING: dict[str, Any] = {
    "data": "digits",
    "partition": "dirichlet(alpha=1)",
    "model": "mlp(hidden='8')",
    "clients": 3,
    "rounds": 2,
    "training": 0.2,
    "dtype": "float64",
    "seed": 3,
}

# (partition, asked, reply) -> what arrives; None: nothing
Tamper = Callable[[int, Message, Message], Message | None]


def through(message: Message) -> Message:
    """Return a message as the receiver gets it."""
    contents = {name: item.deflate() for name, item in get_all_nested_objects(message).items()}
    number = message.object_id
    arrived = inflate_object_from_contents(number, contents)
    assert isinstance(arrived, Message)
    arrived.metadata.__dict__["_message_id"] = number
    return arrived


@dataclass
class Double(Grid):
    """Nodes with numbers as wild as Flower's, in no order."""

    app: ClientApp
    parts: int
    tamper: Tamper = lambda part, asked, reply: reply
    configs: dict[int, dict[str, Any]] = field(default_factory=dict)
    replies: dict[str, Message] = field(default_factory=dict)
    traffic: list[tuple[int, str]] = field(default_factory=list)  # (partition, kind)
    up: int = 0  # bytes
    down: int = 0

    def __post_init__(self) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.partition = {(7919 * (part + 3)) % 9973: part for part in reversed(range(self.parts))}
        self.contexts = {node: self._context(node) for node in self.partition}
        self.gone: set[int] = set()
        self.after: Callable[[], None] = lambda: None  # done once, when the next reply has left

    def _context(self, node: int) -> Context:
        config = {
            "partition-id": self.partition[node],
            "num-partitions": self.parts,
            **self.configs.get(self.partition[node], {}),
        }
        return Context(
            run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={}
        )

    def restart(self, part: int) -> None:
        node = next(node for node, own in self.partition.items() if own == part)
        self.contexts[node] = self._context(node)

    def set_run(self, run: Any) -> None:
        pass

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *args: Any, **options: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [node for node, part in self.partition.items() if part not in self.gone]

    def get_nodes(self) -> Iterable[Any]:
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._deliver(through(message)) for message in messages]

    def _deliver(self, message: Message) -> str:
        node, number = message.metadata.dst_node_id, message.metadata.message_id
        part = self.partition[node]
        counts = message.metadata.message_type != "query.result"  # it comes after the last round
        if counts:
            self.traffic.append((part, message.metadata.message_type))
            self.down += _bytes(message)
        try:
            context = context_from_proto(context_to_proto(self.contexts[node]))
            reply = self.app(message, context)
            self.contexts[node] = context_from_proto(context_to_proto(context))
        except Exception as error:  # as Flower's ClientApp process does
            reply = Message(Error(code=2, reason=f"{type(error)}:<'{error}'>"), reply_to=message)
        arrived = self.tamper(part, message, through(reply))
        self.after()
        self.after = lambda: None
        if arrived is not None:
            self.up += _bytes(arrived) * counts
            self.replies[number] = arrived
        return number

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(number) for number in message_ids if number in self.replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        raise NotImplementedError


def _bytes(message: Message) -> int:
    return sum(len(item.deflate()) for item in get_all_nested_objects(message).values())


# --- what a run has left


def final(folder: Path) -> dict[str, Tensor]:
    (record,) = find(folder)
    return load_file(record.folder / "final.safetensors")


def rows(folder: Path) -> list[dict[str, Any]]:
    (record,) = find(folder)
    return record.history


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert set(a) == set(b)
    # where nothing is shared, the rows have the losses of the clients' own models
    return max((float((a[name] - b[name]).abs().max()) for name in a), default=0.0)


def check_same(one: Path, other: Path) -> None:
    assert apart(final(one), final(other)) < 1e-12
    for expected, found in zip(rows(one), rows(other), strict=True):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            # a list of lists, without a number to round
            same = value if key == "missing" else pytest.approx(value, abs=1e-10)
            assert found[key] == same, key
