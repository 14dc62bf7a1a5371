"""Random draws as pure functions of a key.

A key is a tuple that names the purpose of the draw: ("batches", seed, round, phase, step, client).
So a client reads the same batches on every engine, in every order and on every machine, and a
resumed run needs no saved generator.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from torch import Tensor

Key = tuple[str | int, ...]


def fold(key: Key) -> int:
    """Return a key as one number of 63 bits, for `uniform` and for torch's generator."""
    return int.from_bytes(_digest(key)[:8], "little") >> 1


def step_keys(key: Key, steps: int) -> "np.typing.NDArray[np.int64]":
    """Return a number of 63 bits for each step under a key, with one hash for all steps."""
    numbers: np.typing.NDArray[np.int64] = many_step_keys([key], steps)[0]
    return numbers


def many_step_keys(keys: Sequence[Key], steps: int) -> "np.typing.NDArray[np.int64]":
    """Return the numbers of `step_keys` for several keys, shape (keys, steps)."""
    first = np.array([fold(("steps", *key)) for key in keys], np.uint64)
    # the sum wraps; `uniform` mixes the bits
    numbers = first[:, None] + np.arange(steps, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (numbers >> np.uint64(1)).astype(np.int64)


def generator(key: Key) -> np.random.Generator:
    """Return a generator on the host for this key."""
    # numpy's stub does not list the protocol that Philox accepts
    return np.random.Generator(np.random.Philox(_Seed(key)))  # type: ignore[arg-type]


class _Seed(ISeedSequence):
    """Seed sequence that gives Philox the digest of a key.

    Philox(key=digest) gives the same generator but first draws entropy from the system.
    """

    def __init__(self, key: Key) -> None:
        self.key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> "np.typing.NDArray[Any]":
        return np.frombuffer(_digest(self.key), np.uint64)


def _digest(key: Key) -> bytes:
    return hashlib.blake2b(repr(key).encode(), digest_size=16).digest()


def uniform(key: Tensor, shape: tuple[int, ...], stream: int = 0) -> Tensor:
    """Return uniform numbers in [0, 1), float32, on the key's device.

    Each is a hash of (key, stream, position), computed with tensor operations only. So the numbers
    are the same under vmap, in a CUDA graph and on every device, which torch's generators do not
    offer. They are good enough for dropout and augmentation, not for cryptography.
    """
    count = 1
    for size in shape:
        count *= size
    position = torch.arange(count, dtype=torch.int64, device=key.device)
    mixed = _mix(position + _mix((key & 0xFFFFFFFF) + 0x9E3779B9 * (stream + 1)))
    mixed = _mix(mixed ^ _mix(key >> 32))
    return ((mixed >> 8).to(torch.float32) / (1 << 24)).reshape(shape)


def _mix(x: Tensor) -> Tensor:
    """Return 32-bit numbers with mixed bits: a hash finaliser of xor-shifts and multiplications.

    The numbers are int64, in which a product of two 32-bit numbers keeps the lower 32 bits.
    """
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)
