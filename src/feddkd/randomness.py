"""Randomness is a path, not a stream.

A key is a tuple that says what the draw is for: ("batches", seed, round, phase, step, client). The
draw is a pure function of its key, so a client reads the same batches on any engine, in any order,
on any machine, and a resumed run needs no saved state.
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
    """A key as one number of 63 bits, for `uniform` and for torch's own generator."""
    return int.from_bytes(_digest(key)[:8], "little") >> 1


def step_keys(key: Key, steps: int) -> "np.typing.NDArray[np.int64]":
    """A number for each step of a path, as `fold` would give; one hash for all of them, since there
    are many.
    """
    numbers: np.typing.NDArray[np.int64] = many_step_keys([key], steps)[0]
    return numbers


def many_step_keys(keys: Sequence[Key], steps: int) -> "np.typing.NDArray[np.int64]":
    """Those of several paths: (paths, steps)."""
    first = np.array([fold(("steps", *key)) for key in keys], np.uint64)
    # wraps; `uniform` does the mixing
    walk = first[:, None] + np.arange(steps, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (walk >> np.uint64(1)).astype(np.int64)


def generator(key: Key) -> np.random.Generator:
    """A host-side generator that is this key's alone."""
    return np.random.Generator(np.random.Philox(_Seed(key)))  # type: ignore[arg-type]  # numpy's stub forgets its own protocol


class _Seed(ISeedSequence):
    """A key as what Philox(key=...) would make of its digest.

    Without it numpy first asks the system for randomness.
    """

    def __init__(self, key: Key) -> None:
        self.key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> "np.typing.NDArray[Any]":
        return np.frombuffer(_digest(self.key), np.uint64)


def _digest(key: Key) -> bytes:
    return hashlib.blake2b(repr(key).encode(), digest_size=16).digest()


def uniform(key: Tensor, shape: tuple[int, ...], stream: int = 0) -> Tensor:
    """Uniform numbers in [0, 1), float32, on the key's device: a hash of (key, stream, position).

    Made of tensor operations alone, so it gives the same numbers under vmap, in a CUDA graph and on
    every device; torch's generators do none of these. Good enough for dropout and augmentation; not
    for cryptography.
    """
    count = 1
    for size in shape:
        count *= size
    position = torch.arange(count, dtype=torch.int64, device=key.device)
    mixed = _mix(position + _mix((key & 0xFFFFFFFF) + 0x9E3779B9 * (stream + 1)))
    mixed = _mix(mixed ^ _mix(key >> 32))
    return ((mixed >> 8).to(torch.float32) / (1 << 24)).reshape(shape)


def _mix(x: Tensor) -> Tensor:
    """A 32-bit finaliser (xor-shift, multiply) carried in int64, where a product of two 32-bit
    numbers wraps harmlessly.
    """
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)
