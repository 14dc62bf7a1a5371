"""The gateway in front of the SuperLink: it refuses strangers, large requests, and requests to the
SuperLink's controls without the secret.

Flower reads a request to its end, however long it is, before it checks who sent it, and it lets
anybody who can reach the SuperLink register keys. The gateway decides before a byte of a request
is read:

* the fleet API is for nodes: a request must be signed by a key in the list of members, which the
  server rewrites when its folder of keys changes;
* large bodies come only from nodes, when they upload, and from the server itself, on this machine;
  a few at a time;
* the runtime API, which checks a token, gets small requests from others; everything else needs the
  secret.

The SuperLink's process runs this file without the rest of the package, because a SuperLink needs no
torch.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import json
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-feddkd-secret"
MEMBERS = "members.json"  # sha256 of a public key -> its name; beside the certificate
FLEET, RUNTIME, HEALTH, HELLO = "/v1/fleet/", "/v1/runtime/", "/health", "/feddkd/hello"
SMALL = 1 << 20  # bytes of a request that holds no tensors
AT_ONCE = 4  # large requests that are read at the same time
SECONDS = 600.0  # for one large request
UNKNOWN = "the server does not know this key: the key must be in its folder of keys"
NOT_ACTIVATED = (
    "this key is online already: another node uses it, or this node has ended less than a minute"
    " ago"
)


class Gateway:
    """An ASGI application that checks requests and passes them on to another application."""

    def __init__(
        self, app: ASGIApp, secret: bytes, most: int, members: Path | None = None, version: str = ""
    ) -> None:
        self._app, self._secret, self._most = app, _as_header(secret), most
        self._members, self._version = MemberList(members), version
        self._large = asyncio.Semaphore(AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers, path = dict(scope["headers"]), scope["path"]
        trusted = hmac.compare_digest(headers.get(HEADER.encode(), b""), self._secret)
        if path == HELLO:
            return await self._greet(headers, send)
        if path.startswith(FLEET) and self._members.name(headers) is None:
            return await _refuse(send, 403, UNKNOWN)
        if not trusted and not path.startswith((FLEET, RUNTIME, HEALTH)):
            return await _refuse(send, 403, "only the server itself may use this")
        uploads = path.startswith(FLEET) and path.endswith("/push-object")
        most = self._most if trusted or uploads or _is_local(scope) else min(SMALL, self._most)
        length = _length(headers)
        if length is None or length > most:
            return await _refuse(send, 413, "too large")
        if path == f"{FLEET}activate-node":
            send = _explained(send)
        if 0 <= length <= SMALL or trusted or _is_local(scope):
            return await self._app(scope, _bounded(receive, most), send)
        async with self._large:
            limit = time.monotonic() + SECONDS
            return await self._app(scope, _bounded(receive, most, limit), send)

    async def _greet(self, headers: dict[bytes, bytes], send: Send) -> None:
        """Tell a node whether its key is known, and the server's version."""
        answer = {"version": self._version, "name": self._members.name(headers)}
        await _answer(send, 200, json.dumps(answer).encode(), b"application/json")


class MemberList:
    """The keys of the nodes that may join, in a file that the server rewrites; None: all keys."""

    def __init__(self, file: Path | None) -> None:
        self._file, self._read_at, self._names = file, -1, dict[str, str]()

    def name(self, headers: dict[bytes, bytes]) -> str | None:
        """Return the name of the key that has signed a request; None if it is not a member."""
        if self._file is None:
            return ""
        try:
            key = base64.b64decode(headers[b"flwr-public-key"], validate=True)
            name = self._current()[hashlib.sha256(key).hexdigest()]
            signature = base64.b64decode(headers[b"flwr-signature"], validate=True)
            public = load_pem_public_key(key)
            assert isinstance(public, ec.EllipticCurvePublicKey)
            public.verify(signature, headers[b"flwr-timestamp"], ec.ECDSA(SHA256()))
            return name
        except (KeyError, ValueError, binascii.Error, InvalidSignature, AssertionError, OSError):
            return None

    def _current(self) -> dict[str, str]:
        assert self._file is not None
        changed = self._file.stat().st_mtime_ns
        if changed != self._read_at:
            self._names, self._read_at = json.loads(self._file.read_text()), changed
        return self._names


def _is_local(scope: Scope) -> bool:
    """Return whether a request comes from the machine of the SuperLink."""
    client, server = scope.get("client") or ("",), scope.get("server") or ("none",)
    return client[0] in ("127.0.0.1", "::1", server[0])


def _length(headers: dict[bytes, bytes]) -> int | None:
    """Return the stated length of a body, -1 if there is none, or None if it is no number."""
    stated = headers.get(b"content-length", b"-1" if b"transfer-encoding" in headers else b"0")
    try:
        return int(stated)
    except ValueError:
        return None


def _bounded(receive: Receive, most: int, limit: float = float("inf")) -> Receive:
    """Return a `receive` that ends a request after `most` bytes, as if the sender had disconnected,
    and at the time `limit`.

    Requests that do not state their length can only be limited in this way.
    """
    received = 0

    async def receive_bounded() -> Message:
        nonlocal received
        try:
            left = None if limit == float("inf") else max(limit - time.monotonic(), 0.0)
            message = await asyncio.wait_for(receive(), left)
        except TimeoutError:
            return {"type": "http.disconnect"}
        received += len(message.get("body", b""))
        return message if received <= most else {"type": "http.disconnect"}

    return receive_bounded


def _explained(send: Send) -> Send:
    """Return a `send` that says why a node with a known key could not be activated."""
    failed = False

    async def send_explained(message: Message) -> None:
        nonlocal failed
        if message["type"] == "http.response.start" and message["status"] >= 400:
            failed = True
            return await _refuse(send, message["status"], NOT_ACTIVATED)
        if not failed:
            await send(message)

    return send_explained


async def _refuse(send: Send, status: int, why: str) -> None:
    """Answer with an error in the form in which flwr's programs show it."""
    content = json.dumps({"code": status, "public_message": why, "detail": why}).encode()
    await _answer(send, status, content, b"application/json", (b"connection", b"close"))


async def _answer(
    send: Send, status: int, content: bytes, kind: bytes, *more: tuple[bytes, bytes]
) -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(content)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


class SecretHeader:
    """Adds the secret to every request of one of flwr's clients (an interceptor of flwr's)."""

    def __init__(self, secret: bytes) -> None:
        self._secret = _as_header(secret)

    def intercept(self, context: Any, call_next: Callable[[Any], Any]) -> httpx.Response:
        """Send a request with the secret in its headers."""
        context.request.headers[HEADER] = self._secret.decode()
        response: httpx.Response = call_next(context)
        return response


def _as_header(secret: bytes) -> bytes:
    return secret.hex().encode()


if __name__ == "__main__":
    from starlette.middleware import Middleware

    most, members, version = int(sys.argv.pop(1)), Path(sys.argv.pop(1)), sys.argv.pop(1)
    secret = Path(sys.argv[sys.argv.index("--superexec-auth-secret-file") + 1]).read_bytes()
    # Loaded by its path: an import by name would import the whole package.
    internals = runpy.run_path(str(Path(__file__).parents[1] / "flwr_internals.py"))
    internals["run_superlink"]([Middleware(Gateway, secret, most, members, version)])
