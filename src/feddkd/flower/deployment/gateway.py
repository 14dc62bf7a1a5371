"""The gateway in front of the SuperLink: it refuses large requests, and requests to the SuperLink's
controls without the secret.

Flower reads a request to its end, however long it is, before it checks who sent it, and it lets
anybody who can reach the SuperLink register keys. The gateway decides both before Flower sees a
request. Without the secret a request may only use the fleet API, which checks nodes' keys, and the
runtime API, which checks a token.

The SuperLink's process runs this file without the rest of the package, because a SuperLink needs no
torch.
"""

import hmac
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-feddkd-secret"
OPEN = ("/v1/fleet/", "/v1/runtime/", "/health")


class Gateway:
    """An ASGI application that checks requests and passes them on to another application."""

    def __init__(self, app: ASGIApp, secret: bytes, most: int) -> None:
        self._app, self._secret, self._most = app, _as_header(secret), most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        if not scope["path"].startswith(OPEN) and not hmac.compare_digest(
            headers.get(HEADER.encode(), b""), self._secret
        ):
            return await _refuse(send, 403, b"only the server itself may use this")
        if int(headers.get(b"content-length", b"0")) > self._most:
            return await _refuse(send, 413, b"too large")
        return await self._app(scope, _bounded(receive, self._most), send)


def _bounded(receive: Receive, most: int) -> Receive:
    """Return a `receive` that ends a request after `most` bytes, as if the sender had disconnected.

    Requests that do not state their length can only be limited in this way.
    """
    received = 0

    async def receive_bounded() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        return message if received <= most else {"type": "http.disconnect"}

    return receive_bounded


async def _refuse(send: Send, status: int, why: bytes) -> None:
    headers = (b"content-type", b"text/plain"), (b"connection", b"close")
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": why})


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

    most = int(sys.argv.pop(1))
    secret = Path(sys.argv[sys.argv.index("--superexec-auth-secret-file") + 1]).read_bytes()
    # Loaded by its path: an import by name would import the whole package.
    internals = runpy.run_path(str(Path(__file__).parents[1] / "flwr_internals.py"))
    internals["run_superlink"]([Middleware(Gateway, secret=secret, most=most)])
