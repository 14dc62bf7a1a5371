"""Keys, and shares that are encrypted for one client, with flwr's primitives: ECDH with HKDF,
Fernet.

All randomness here is the operating system's (os.urandom and OpenSSL). A mask that can be computed
from an experiment's seed would hide nothing.
"""

import base64
import os
from collections.abc import Sequence

from cryptography.fernet import InvalidToken
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from feddkd.flower.flwr_internals import (
    decrypt,
    encrypt,
    generate_shared_key,
    share_keys_plaintext_concat,
    share_keys_plaintext_separate,
)
from feddkd.flower.shamir import SECRET, SHARE
from feddkd.flower.wire import WireError
from feddkd.method import Exchange

LEAST = 3  # clients in a sum: with two, each could compute the other's upload
CURVE = ec.SECP256R1()


def name_of(index: int, step: int) -> str:
    """Return the name of an exchange within its round."""
    return f"{index}-{step}"


def names_of(plan: Sequence[Exchange]) -> list[str]:
    """Return the names of the exchanges of a round that need secrets."""
    return [
        name_of(exchange.index, exchange.step) for exchange in plan if exchange.phase.asks_clients
    ]


def new_seed() -> bytes:
    """Return a new random seed."""
    return os.urandom(SECRET)


def new_key() -> bytes:
    """Return a new private key as bytes, so that it can be split into shares."""
    return ec.generate_private_key(CURVE).private_numbers().private_value.to_bytes(SECRET, "big")


def public(key: bytes) -> bytes:
    """Return the public key of a private key."""
    return _private(key).public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


def check_public(point: bytes) -> None:
    """Raise WireError if the bytes are not a public key."""
    _point(point)


def agree(key: bytes, point: bytes) -> bytes:
    """Return the secret of two parties, from one's private key and the other's public key."""
    return base64.urlsafe_b64decode(generate_shared_key(_private(key), _point(point)))


def derive(seed: bytes, purpose: str) -> bytes:
    """Return 32 bytes derived from a seed for a purpose, "mask" or "check".

    The check identifies the seed and says nothing about the mask.
    """
    return HKDF(SHA256(), SECRET, None, purpose.encode()).derive(seed)


def seal(
    channel: bytes, sender: int, receiver: int, seeds: Sequence[bytes], keys: Sequence[bytes]
) -> bytes:
    """Encrypt shares of seeds and keys for one other client; the server cannot read them."""
    plain = share_keys_plaintext_concat(sender, receiver, b"".join(seeds), b"".join(keys))
    return encrypt(base64.urlsafe_b64encode(channel), plain)


def unseal(
    channel: bytes, sender: int, receiver: int, sealed: bytes, count: int
) -> tuple[list[bytes], list[bytes]]:
    """Decrypt `count` shares of seeds and as many of keys.

    Raise WireError if they are damaged, or if sender or receiver are not these two.
    """
    try:
        plain = share_keys_plaintext_separate(decrypt(base64.urlsafe_b64encode(channel), sealed))
    except InvalidToken:
        raise WireError(f"the shares of client {sender} cannot be decrypted") from None
    *parties, seeds, keys = plain
    if parties != [sender, receiver] or {len(seeds), len(keys)} != {count * SHARE}:
        raise WireError(f"the shares of client {sender} have the wrong sender, receiver or size")
    return _shares(seeds), _shares(keys)


def _shares(content: bytes) -> list[bytes]:
    return [content[start : start + SHARE] for start in range(0, len(content), SHARE)]


def _private(key: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        return ec.derive_private_key(int.from_bytes(key, "big"), CURVE)
    except ValueError as error:
        raise WireError(f"not a private key: {error}") from None


def _point(point: bytes) -> ec.EllipticCurvePublicKey:
    try:
        return ec.EllipticCurvePublicKey.from_encoded_point(CURVE, point)
    except ValueError as error:
        raise WireError(f"not a public key: {error}") from None
