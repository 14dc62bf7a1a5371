"""The SuperLink with a door before it: nothing too large gets in, and only who knows the secret
gets to its controls.

Flower reads a request to its end, however long it is, before it asks who sent it; and it lets
anybody who reaches the SuperLink register keys. Both are settled here, before Flower sees a
request. Without the secret there is the fleet's part of the interface, which asks nodes for their
keys, and the runtime's, which asks for a token.

A process of its own runs this file, without the rest of the package: a SuperLink needs no torch.
"""

import hmac
import sys
from pathlib import Path

import httpx
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-feddkd-secret"
OPEN = ("/v1/fleet/", "/v1/runtime/", "/health")


class Door:
    """An ASGI application around another."""

    def __init__(self, app: ASGIApp, secret: bytes, most: int) -> None:
        self._app, self._secret, self._most = app, _spelled(secret), most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        if not scope["path"].startswith(OPEN) and not hmac.compare_digest(
            headers.get(HEADER.encode(), b""), self._secret
        ):
            return await _refuse(send, 403, b"this is for the server itself")
        if int(headers.get(b"content-length", b"0")) > self._most:
            return await _refuse(send, 413, b"too large")
        return await self._app(scope, _bounded(receive, self._most), send)


def _bounded(receive: Receive, most: int) -> Receive:
    """Requests that do not say how long they are get no further than the bound: to Flower it is as
    if the sender had left.
    """
    seen = 0

    async def receive_so_far() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        return message if seen <= most else {"type": "http.disconnect"}

    return receive_so_far


async def _refuse(send: Send, status: int, why: bytes) -> None:
    kind = (b"content-type", b"text/plain"), (b"connection", b"close")
    await send({"type": "http.response.start", "status": status, "headers": list(kind)})
    await send({"type": "http.response.body", "body": why})


class Key:
    """Shows the secret with every request of one of Flower's clients."""

    def __init__(self, secret: bytes) -> None:
        self._secret = _spelled(secret)

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        context.request.headers[HEADER] = self._secret.decode()
        return call_next(context)


def _spelled(secret: bytes) -> bytes:
    return secret.hex().encode()


if __name__ == "__main__":
    from flwr.superlink import extensions
    from flwr.superlink.cli import flower_superlink
    from starlette.middleware import Middleware

    most = int(sys.argv.pop(1))
    secret = Path(sys.argv[sys.argv.index("--superexec-auth-secret-file") + 1]).read_bytes()
    extensions.get_middleware = lambda: (Middleware(Door, secret=secret, most=most),)
    flower_superlink()
