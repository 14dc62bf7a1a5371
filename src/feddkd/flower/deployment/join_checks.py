"""Checks of a node before it joins: the server can be reached, has the right certificate, knows the
node's key and has the same version.

Each obstacle has its own message. Where waiting helps (the server is not up yet, its operator has
not registered the key, its certificate is being renewed) the node tries again.
"""

import base64
import hashlib
import logging
import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
)

from feddkd.errors import InputError
from feddkd.flower.deployment.credentials import WARNING_DAYS
from feddkd.flower.deployment.gateway import HELLO
from feddkd.version import __version__

log = logging.getLogger(__name__)
PAUSE = 5.0  # seconds between two tries
NEWS = 60.0  # seconds until the same obstacle is logged again
EXPIRED, OTHER_NAME = 10, (62, 64)  # codes of OpenSSL


class NotYetError(Exception):
    """The node cannot join yet; it may later."""


def wait_to_join(superlink: str, key: Path, authority: Path) -> None:
    """Return when the node may join; raise InputError if waiting does not help."""
    trust = _trust(authority)
    told, last = -NEWS, ""
    while True:
        try:
            _check_server(superlink, key, trust)
            return
        except NotYetError as reason:
            if str(reason) != last or time.monotonic() - told > NEWS:
                log.warning("%s; trying again every %g s", reason, PAUSE)
                told, last = time.monotonic(), str(reason)
            time.sleep(PAUSE)


def _trust(authority: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=authority)
    except (ssl.SSLError, OSError) as error:
        raise InputError(f"{authority} holds no certificate: {error}") from None


def _check_server(superlink: str, key: Path, trust: ssl.SSLContext) -> None:
    """Ask the server once. A SuperLink that is not feddkd's has no answer, and nothing is known."""
    headers = _signed(key)
    try:
        with httpx.Client(verify=trust, timeout=10.0) as client:
            answer = client.get(f"https://{superlink}{HELLO}", headers=headers)
    except httpx.TransportError as error:
        raise _obstacle(superlink, error) from None
    _warn_of_expiry(superlink, answer)
    if answer.status_code != 200:
        return
    told = answer.json()
    if told["version"] != __version__:
        raise InputError(
            f"the server at {superlink} has feddkd {told['version']}, this node has {__version__};"
            " install the same version"
        )
    if told["name"] is None:
        shown = hashlib.sha256(base64.b64decode(headers["flwr-public-key"])).hexdigest()[:16]
        raise NotYetError(
            f"the server at {superlink} does not know this node's key (sha256 {shown}...): its"
            f" operator must put {key.name}.pub into the server's folder of keys"
        )


def _obstacle(superlink: str, error: httpx.TransportError) -> Exception:
    """Return the error that says why a server could not be asked."""
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            if cause.verify_code == EXPIRED:
                return NotYetError(
                    f"the certificate of {superlink} (or the ca.crt of this node) has expired: the"
                    " server's operator must renew it (feddkd flower certificate DIR --renew)"
                )
            if cause.verify_code in OTHER_NAME:
                return InputError(
                    f"the certificate of the server is not for {superlink}: {cause.verify_message}"
                )
            return InputError(
                f"the server at {superlink} is not the one that --authority belongs to:"
                f" {cause.verify_message}"
            )
    return NotYetError(f"the server at {superlink} cannot be reached: {error}")


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _warn_of_expiry(superlink: str, answer: httpx.Response) -> None:
    stream: Any = answer.extensions.get("network_stream")
    tls = stream.get_extra_info("ssl_object") if stream is not None else None
    if tls is None:
        return
    until = datetime.fromtimestamp(ssl.cert_time_to_seconds(tls.getpeercert()["notAfter"]), UTC)
    days = (until - datetime.now(UTC)).days
    if days < WARNING_DAYS:
        log.warning("the certificate of %s expires in %s days", superlink, days)


def _signed(key: Path) -> dict[str, str]:
    """Return headers that show which key the node has, as those of Flower's own requests."""
    try:
        private = load_ssh_private_key(key.read_bytes(), None)
    except (OSError, ValueError) as error:
        raise InputError(f"{key} holds no private key: {error}") from None
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise InputError(f"{key} is not an elliptic-curve key; feddkd flower key makes one")
    public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    now = datetime.now(UTC).isoformat()
    signature = private.sign(now.encode(), ec.ECDSA(SHA256()))
    return {
        "flwr-public-key": base64.b64encode(public).decode(),
        "flwr-timestamp": now,
        "flwr-signature": base64.b64encode(signature).decode(),
    }
