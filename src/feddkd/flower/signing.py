"""Signatures under the public keys of secure aggregation, by the keys of the nodes.

The keys of a round pass through the server. A node that was given the public keys of the other
hospitals by hand takes only those that one of them has signed, one client for each hospital. So the
server can neither replace them nor invent clients.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from feddkd.errors import InputError
from feddkd.flower.membership import pinned_client
from feddkd.flower.messages import PublicKeys
from feddkd.flower.wire import WireError


def signed(keys: PublicKeys, client: int, session: str, round: str, file: Path) -> PublicKeys:
    """Return a client's public keys with the name of a node's key and its signature."""
    private = _private(file)
    signature = private.sign(_text(keys, client, session, round), ec.ECDSA(SHA256()))
    return replace(keys, signer=_name(private.public_key()), signature=signature.hex())


def check_signed(
    public: Mapping[int, PublicKeys], client: int, session: str, round: str, peers: Path
) -> None:
    """Raise WireError if the keys of a member other than `client` are not signed by a peer's key.

    `peers` is a folder of public keys. One key stands for one client; that of a file `3.pub` or
    `3-NAME.pub` stands for client 3.
    """
    known, seen = _public_keys(peers), dict[str, int]()
    for member, keys in public.items():
        if member == client:
            continue
        name, key = known.get(keys.signer or "", ("", None))
        if key is None:
            raise WireError(f"the keys of client {member} are not signed by a known hospital")
        if pinned_client(name) not in (None, member):
            raise WireError(f"the keys of client {member} are signed by {name}")
        if keys.signer in seen:
            raise WireError(f"clients {seen[keys.signer]} and {member} are both signed by {name}")
        seen[str(keys.signer)] = member
        _verify(key, keys, member, session, round)


def _verify(
    key: ec.EllipticCurvePublicKey, keys: PublicKeys, member: int, session: str, round: str
) -> None:
    try:
        signature = bytes.fromhex(keys.signature or "")
        key.verify(signature, _text(keys, member, session, round), ec.ECDSA(SHA256()))
    except (InvalidSignature, ValueError):
        raise WireError(f"the signature under the keys of client {member} is wrong") from None


def _text(keys: PublicKeys, client: int, session: str, round: str) -> bytes:
    """Return what is signed: the keys, and for whom and for which round they are."""
    unsigned = asdict(replace(keys, signer=None, signature=None))
    return json.dumps(["feddkd keys", client, session, round, unsigned], sort_keys=True).encode()


@lru_cache(maxsize=8)
def _private(file: Path) -> ec.EllipticCurvePrivateKey:
    key = load_ssh_private_key(file.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def _public_keys(folder: Path) -> dict[str, tuple[str, ec.EllipticCurvePublicKey]]:
    """Return the public keys in a folder, each with the name of its file, by their names."""
    keys = {}
    for file in sorted(folder.glob("*.pub")):
        key = load_ssh_public_key(file.read_bytes())
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise InputError(f"{file} is not an elliptic-curve key")
        keys[_name(key)] = (file.stem, key)
    return keys


def _name(key: ec.EllipticCurvePublicKey) -> str:
    content = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(content).hexdigest()
