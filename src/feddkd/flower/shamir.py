"""Shamir's secret sharing over the integers modulo a prime just above 2^256.

A. Shamir, "How to share a secret", Communications of the ACM 22, 1979, doi:10.1145/359168.359176. A
secret of 32 bytes is f(0) of a random polynomial f of degree t - 1; the share of member k is f(k):

    f(0) = sum_k f(k) prod_{j != k} j / (j - k)

The products depend only on which members give their shares. They are computed once for all secrets
of a sum, so a secret costs t multiplications of 256 bits.
"""

import functools
import secrets
from collections.abc import Sequence

from feddkd.flower.wire import WireError

PRIME = 2**256 + 297
SECRET = 32  # bytes of a secret
NUMBER, VALUE = 4, 33  # bytes of the two parts of a share: the member's number, and f of it
SHARE = NUMBER + VALUE


def split(secret: bytes, threshold: int, members: int) -> list[bytes]:
    """Return shares for members 1, 2, ...

    `threshold` of them give the secret; fewer give nothing.
    """
    start = int.from_bytes(secret, "little")
    rest = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    return [_share(number, [*rest, start]) for number in range(1, members + 1)]


def _share(number: int, coefficients: Sequence[int]) -> bytes:
    value = 0
    for coefficient in coefficients:  # from the highest power down: Horner's rule
        value = (value * number + coefficient) % PRIME
    return number.to_bytes(NUMBER, "little") + value.to_bytes(VALUE, "little")


def join(shares: Sequence[bytes]) -> bytes:
    """Return the secret that the shares give, or raise WireError if they give none."""
    numbers = tuple(map(number, shares))
    values = [int.from_bytes(share[NUMBER:], "little") for share in shares]
    if len(set(numbers)) < len(numbers) or 0 in numbers or max(values, default=PRIME) >= PRIME:
        raise WireError("the shares do not fit together")
    secret = sum(map(int.__mul__, _weights(numbers), values)) % PRIME
    if secret >> 8 * SECRET:
        raise WireError("the shares do not fit together")
    return secret.to_bytes(SECRET, "little")


def number(share: bytes) -> int:
    """Return the number of the member that a share was made for."""
    if len(share) != SHARE:
        raise WireError(f"a share has {len(share)} bytes; it should have {SHARE}")
    return int.from_bytes(share[:NUMBER], "little")


@functools.lru_cache(maxsize=4)
def _weights(numbers: tuple[int, ...]) -> list[int]:
    """Return the weights of the shares with these numbers: prod_{j != k} j / (j - k)."""
    weights = []
    for k in numbers:
        above, below = 1, 1
        for j in numbers:
            if j != k:
                above, below = above * j % PRIME, below * (j - k) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return weights
