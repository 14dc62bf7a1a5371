"""Tests of the gateway in front of the SuperLink.

It refuses large requests, access to the control interface, and a node's access to the messages of
another node.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr")

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import HEARTBEAT_MIN_INTERVAL
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from feddkd.flower.deployment.credentials import make_node, make_server
from feddkd.flower.deployment.gateway import Gateway
from feddkd.flower.deployment.processes import Processes, free_port
from feddkd.flower.deployment.superlink import Superlink
from feddkd.flower.transport import bytes_in, tensor_record
from feddkd.flower.wire import MOST, WireError, unpack

# Flower's own
pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")


async def count(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the length of what it was sent."""
    body = await Request(scope, receive).body()
    await PlainTextResponse(str(len(body)))(scope, receive, send)


def status(path: str, content: Any = b"", secret: bytes = b"") -> int:
    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(Gateway(count, b"sesame", most=100))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.post(
                path, content=content, headers={"x-feddkd-secret": secret.hex()} if secret else {}
            )

    return asyncio.run(call()).status_code


@pytest.mark.parametrize(
    "path", ["/v1/control/register-node", "/v1/control/start-run", "/docs", "/v1/responses", "/"]
)
def test_the_controls_are_for_who_knows_the_secret(path: str) -> None:
    assert status(path) == status(path, secret=b"guess") == 403
    assert status(path, secret=b"sesame") == 200


@pytest.mark.parametrize("path", ["/v1/fleet/push-object", "/v1/runtime/push-object", "/health"])
def test_nothing_too_large_gets_in(path: str) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield bytes(30)

    assert status(path, bytes(100)) == 200
    assert status(path, bytes(101)) == 413
    with pytest.raises(ClientDisconnect):  # of unknown length: cut off
        status(path, pieces())


def test_a_node_reads_no_order_that_is_too_large() -> None:
    with pytest.raises(WireError, match="1,073,741,824"):
        unpack(bytes(MOST + 1))


# --- a SuperLink, and two nodes that are played here


class Played:
    """A node without a SuperNode: it calls the SuperLink itself and may pretend to be another."""

    def __init__(self, link: Superlink, key: Path) -> None:
        private = load_ssh_private_key(key.read_bytes(), None)
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        sign = NodeAuthHttpInterceptor(private, private.public_key())
        self.client = link._open(
            FleetHttpClient, RuntimeVersionHttpInterceptor(component_name="SuperNode"), sign
        )
        self._public = public_key_to_bytes(private.public_key())

    def join(self) -> Node:
        told = ActivateNodeRequest(
            public_key=self._public, heartbeat_interval=HEARTBEAT_MIN_INTERVAL
        )
        return Node(node_id=self.client.ActivateNode(told).node_id)

    def upload(self, node: Node, run: int, reply: Message) -> None:
        parts = get_all_nested_objects(reply)
        told = [message_to_proto(remove_content_from_message(reply))], [get_object_tree(reply)]
        given = self.client.PushMessages(
            PushMessagesRequest(node=node, messages_list=told[0], message_object_trees=told[1])
        )
        for number in given.objects_to_push:
            content = parts[number].deflate()
            self.client.PushObject(
                PushObjectRequest(
                    node=node,
                    run_id=run,
                    object_id=number,
                    object_content=content,
                    session_id=given.session_id,
                )
            )


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Superlink]:
    folder = tmp_path_factory.mktemp("link")
    make_server(folder, ["localhost"])
    with Processes(folder) as processes:
        link = Superlink(folder, processes, free_port())
        link.start()
        for name in ("a", "b"):
            make_node(folder / name)
            link.register(folder / f"{name}.pub")
        yield link


def test_a_node_cannot_read_what_another_sends_or_is_sent(link: Superlink) -> None:
    a, b = Played(link, link.folder / "a"), Played(link, link.folder / "b")
    with closing(a.client), closing(b.client), link.run() as grid:
        own, other = a.join(), b.join()
        grid.push_messages(
            [Message(RecordDict({"tensors": tensor_record(b"for a")}), own.node_id, "train.local")]
        )
        assert not b.client.PullMessages(PullMessagesRequest(node=other)).messages_list
        refused(b.client.PullMessages, PullMessagesRequest(node=own))
        (asked,) = a.client.PullMessages(PullMessagesRequest(node=own)).messages_list
        asked = message_from_proto(asked)
        reply = Message(RecordDict({"tensors": tensor_record(b"a's upload")}), reply_to=asked)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        run, parts = grid.run.run_id, get_all_nested_objects(reply)
        a.upload(own, run, reply)
        assert not b.client.PullMessages(PullMessagesRequest(node=other)).messages_list
        for number in parts:
            refused(b.client.PullObject, PullObjectRequest(node=own, run_id=run, object_id=number))
        # only the sender and the receiver know the content, and so its name
        guess = hashlib.sha256(b"a guess").hexdigest()
        assert not b.client.PullObject(
            PullObjectRequest(node=other, run_id=run, object_id=guess)
        ).object_found
        (arrived,) = grid.pull_messages([asked.metadata.message_id])
        assert bytes_in(arrived.content) == b"a's upload"


def refused(call: Any, request: Any) -> None:
    with pytest.raises(httpx.HTTPStatusError) as error:
        call(request)
    assert error.value.response.status_code in (401, 403)


def test_a_registered_node_gets_neither_to_the_controls_nor_to_the_servers_messages(
    link: Superlink,
) -> None:
    version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
    with closing(link._open(ControlHttpClient, version)) as control:
        refused(control.ListNodes, ListNodesRequest())
        refused(control.RegisterNode, RegisterNodeRequest(public_key=b"mine"))
    with closing(link._open(RuntimeHttpClient, version)) as runtime:
        refused(runtime.PullMessages, PullAppMessagesRequest(message_ids=["some"]))
