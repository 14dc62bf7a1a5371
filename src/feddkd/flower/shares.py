"""Keys, and secrets in shares, on Flower's primitives: ECDH with HKDF, Fernet, Shamir's sharing.

All randomness here is the system's (os.urandom, OpenSSL's): a mask that an experiment's seed could
give again would hide nothing.
"""

import base64
import os
from collections.abc import Sequence

from cryptography.fernet import InvalidToken
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import (
    decrypt,
    encrypt,
    generate_shared_key,
)
from flwr.common.secure_aggregation.secaggplus_utils import (
    share_keys_plaintext_concat,
    share_keys_plaintext_separate,
)

from feddkd.flower.wire import WireError
from feddkd.method import Exchange

LEAST = 3  # clients in a sum: of two, each could tell the other's upload
CURVE = ec.SECP256R1()
SECRET = 32  # bytes of a seed, and of a private key
SHARE = 52  # bytes of a share of such a secret: its number, and three blocks


def name_of(index: int, step: int) -> str:
    """An exchange within its round."""
    return f"{index}-{step}"


def names_of(plan: Sequence[Exchange]) -> list[str]:
    """The exchanges of a round for which secrets are needed."""
    return [
        name_of(exchange.index, exchange.step) for exchange in plan if exchange.phase.asks_clients
    ]


def new_seed() -> bytes:
    return os.urandom(SECRET)


def new_key() -> bytes:
    """A private key as its bytes, which can be shared."""
    return ec.generate_private_key(CURVE).private_numbers().private_value.to_bytes(SECRET, "big")


def public(key: bytes) -> bytes:
    return _private(key).public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


def check_public(point: bytes) -> None:
    _point(point)


def agree(key: bytes, point: bytes) -> bytes:
    """The secret of two: the same from either's private key and the other's public one."""
    return base64.urlsafe_b64decode(generate_shared_key(_private(key), _point(point)))


def derive(seed: bytes, purpose: str) -> bytes:
    """From a seed its "mask", and its "check", by which it is known again and which tells nothing
    of the mask.
    """
    return HKDF(SHA256(), SECRET, None, purpose.encode()).derive(seed)


def split(secret: bytes, threshold: int, members: int) -> list[bytes]:
    """Shares for members 1, 2, ...: `threshold` of them give the secret, fewer give nothing."""
    return create_shares(secret, threshold, members)


def join(shares: Sequence[bytes]) -> bytes:
    try:
        return combine_shares(list(shares))
    except ValueError as error:
        raise WireError(f"shares that do not go together: {error}") from None


def number(share: bytes) -> int:
    """Whose share it is."""
    if len(share) != SHARE:
        raise WireError(f"a share of {len(share)} bytes, and it should be {SHARE}")
    return int.from_bytes(share[:4], "little")


def seal(
    channel: bytes, sender: int, receiver: int, seeds: Sequence[bytes], keys: Sequence[bytes]
) -> bytes:
    """Shares for one other client, that the server carries and cannot read."""
    plain = share_keys_plaintext_concat(sender, receiver, b"".join(seeds), b"".join(keys))
    return encrypt(base64.urlsafe_b64encode(channel), plain)


def unseal(
    channel: bytes, sender: int, receiver: int, sealed: bytes, count: int
) -> tuple[list[bytes], list[bytes]]:
    """The shares of so many seeds and keys, if they are from whom they should be, for whom they
    should be, and whole.
    """
    try:
        found = share_keys_plaintext_separate(decrypt(base64.urlsafe_b64encode(channel), sealed))
    except InvalidToken:
        raise WireError(f"the shares of client {sender} cannot be opened") from None
    if found[:2] != (sender, receiver) or any(len(part) != count * SHARE for part in found[2:]):
        raise WireError(f"the shares of client {sender} are not what they should be")
    seeds, keys = (
        [part[at : at + SHARE] for at in range(0, count * SHARE, SHARE)] for part in found[2:]
    )
    return seeds, keys


def _private(key: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        return ec.derive_private_key(int.from_bytes(key, "big"), CURVE)
    except ValueError as error:
        raise WireError(f"no private key: {error}") from None


def _point(point: bytes) -> ec.EllipticCurvePublicKey:
    try:
        return ec.EllipticCurvePublicKey.from_encoded_point(CURVE, point)
    except ValueError as error:
        raise WireError(f"no public key: {error}") from None
