"""Tests of the gateway in front of the SuperLink.

It refuses large requests, access to the control interface, and a node's access to the messages of
another node.
"""

import asyncio
import base64
import hashlib
import json
import shutil
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr")

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
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
from flwr.supercore import sql_mixin
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.corestate import sql_corestate
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.superlink import extensions
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from feddkd.flower import flwr_internals
from feddkd.flower.deployment.credentials import make_node, make_server, read_public
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


# --- strangers


def signed(key: Path, public: Path | None = None) -> dict[str, str]:
    """Return the headers of a request that is signed by a key."""
    private = load_ssh_private_key(key.read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    time = "2026-11-19T12:00:00+00:00"
    signature = private.sign(time.encode(), ec.ECDSA(SHA256()))
    shown = read_public(public or key.with_name(f"{key.name}.pub"))
    return {
        "flwr-public-key": base64.b64encode(shown).decode(),
        "flwr-signature": base64.b64encode(signature).decode(),
        "flwr-timestamp": time,
    }


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the keys `known` and `stranger`; the list of members has the first."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("known", "stranger"):
        make_node(folder / name)
    known = hashlib.sha256(read_public(folder / "known.pub")).hexdigest()
    (folder / "members.json").write_text(json.dumps({known: "known"}))
    return folder


LARGE = 3 << 20


def asked(folder: Path, path: str, headers: dict[str, str], size: int) -> tuple[int, int, str]:
    """Return the status, how many bytes of the body were read, and the answer."""
    read = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(size >> 16):
            read += 1 << 16
            yield bytes(1 << 16)

    async def call() -> httpx.Response:
        gateway = Gateway(count, b"sesame", 1 << 30, folder / "members.json", "1.2.3")
        transport = httpx.ASGITransport(gateway, client=("192.0.2.7", 999))
        stated = {**headers, "content-length": str(size)}
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.post(path, content=body(), headers=stated)

    response = asyncio.run(call())
    return response.status_code, read, response.text


def test_a_known_node_uploads_and_a_stranger_is_not_even_read(guarded: Path) -> None:
    upload = "/v1/fleet/push-object"
    good = signed(guarded / "known")
    assert asked(guarded, upload, good, LARGE) == (200, LARGE, str(LARGE))
    strangers = {
        "no key": {},
        "unknown key": signed(guarded / "stranger"),
        "another's key": signed(guarded / "stranger", guarded / "known.pub"),
        "no signature": {**good, "flwr-signature": "AAAA"},
        "nonsense": {**good, "flwr-public-key": "%%%"},
    }
    for who, headers in strangers.items():
        status, read, _ = asked(guarded, upload, headers, LARGE)
        assert (status, read) == (403, 0), who


@pytest.mark.parametrize(
    "path", ["/v1/fleet/push-messages", "/v1/runtime/push-object", "/health", "/feddkd/hello"]
)
def test_only_uploads_of_nodes_are_large(path: str, guarded: Path) -> None:
    status, read, _ = asked(guarded, path, signed(guarded / "known"), LARGE)
    assert status == (200 if path == "/feddkd/hello" else 413)
    assert read == 0


def test_a_key_that_leaves_the_list_is_shut_out_at_once(guarded: Path, tmp_path: Path) -> None:
    for name in ("known", "known.pub", "members.json"):
        shutil.copy(guarded / name, tmp_path / name)
    headers, path = signed(tmp_path / "known"), "/v1/fleet/pull-messages"
    assert asked(tmp_path, path, headers, 0)[0] == 200
    (tmp_path / "members.json").write_text("{}")
    assert asked(tmp_path, path, headers, 0)[0] == 403


def test_a_node_is_told_whether_its_key_is_known_and_the_version(guarded: Path) -> None:
    for name, known in (("known", "known"), ("stranger", None)):
        _, _, text = asked(guarded, "/feddkd/hello", signed(guarded / name), 0)
        assert json.loads(text) == {"version": "1.2.3", "name": known}


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
        link.admit({read_public(folder / f"{name}.pub"): name for name in ("a", "b")})
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


def test_a_request_waits_for_a_database_that_another_writes_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection, waits = sqlite3.connect(":memory:"), list[int]()

    def superlink() -> None:
        sql_mixin._set_sqlite_pragmas(connection, None)
        waits.extend(connection.execute("PRAGMA busy_timeout").fetchone())

    monkeypatch.setattr(sql_mixin, "SQLITE_PRAGMAS", vars(sql_mixin)["SQLITE_PRAGMAS"])
    monkeypatch.setattr(sql_corestate, "HEARTBEAT_PATIENCE", 2)
    monkeypatch.setattr(extensions, "get_middleware", extensions.get_middleware)
    monkeypatch.setattr(flwr_internals, "flower_superlink", superlink)
    flwr_internals.run_superlink([])
    connection.close()
    assert waits == [flwr_internals.LOCKED]
    assert vars(sql_corestate)["HEARTBEAT_PATIENCE"] == flwr_internals.PATIENCE
