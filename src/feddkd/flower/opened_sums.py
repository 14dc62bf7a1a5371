"""The memory of a client: the sums that it has helped to open.

Two sums over nearly the same uploads of which one lacks a client differ by that client's upload. So
a client whose update is nearly the one of an earlier sum helps only for the same survivors, however
the experiment, the round or the session is called now.

Of an update it keeps a sketch for each group: every number gets a random sign and one of 64 places,
by a key that never leaves the node, and the numbers of a place are added. The angle between two
sketches is nearly that between the updates; the length does not count, because a server could ask
for the same update with another learning rate.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddkd.flower.wire import NodeMemory, WireError
from feddkd.randomness import generator
from feddkd.runs.files import put
from feddkd.tensors import Groups

NEAR = 1e-3  # of the length of an update: two updates that differ by less are nearly the same
PLACES = 64
MOST = 100_000  # records that a client keeps; 29 MB
SALT = 32  # bytes of the key of the sketches, at the head of the memory
FEW = 3  # numbers
CHUNK = 1 << 20  # numbers that are sketched at a time
RECORD = np.dtype([("group", "V16"), ("survivors", "V16"), ("sketch", "<f4", PLACES)])
Sketches = Mapping[str, NDArray[np.float32]]  # by group
PREFIX = "sums:"


def tag(client: int) -> str:
    """Return the tag under which a node keeps what a client remembers."""
    return f"{PREFIX}{client}"


def new_memory() -> bytes:
    """Return a memory without records, with a new key."""
    return os.urandom(SALT)


def sketches(memory: bytes, upload: Groups, sent: Groups) -> Sketches:
    """Return the sketch of each group of an update, with the length 1.

    There is none of a group of zeros or of fewer than three numbers, whose directions say little.
    """
    salt, found = memory[:SALT].hex(), {}
    for group, tensors in upload.items():
        sketch = np.zeros(PLACES)
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                sketch += _sketch((salt, group, name), tensor, sent.get(group, {}).get(name))
        length = float(np.linalg.norm(sketch))
        if sum(tensor.numel() for tensor in tensors.values()) >= FEW and 0 < length < np.inf:
            found[group] = (sketch / length).astype("<f4")
    return found


def _sketch(key: tuple[str, ...], tensor: Tensor, origin: Tensor | None) -> NDArray[np.float64]:
    drawn, sketch = generator(("sketch", *key)), np.zeros(PLACES)
    for part in _parts(tensor, origin):
        places = drawn.integers(0, 2 * PLACES, len(part), np.uint8)
        signed = np.where(places & 1, part, -part)
        sketch += np.bincount(places >> 1, signed, PLACES)
    return sketch


def _parts(tensor: Tensor, origin: Tensor | None) -> Iterator[NDArray[np.float64]]:
    """Yield the difference between two tensors, in pieces."""
    flat = tensor.detach().cpu().reshape(-1)
    before = None if origin is None else origin.detach().cpu().reshape(-1)
    for start in range(0, len(flat), CHUNK):
        part = flat[start : start + CHUNK].to(torch.float64)
        if before is not None:
            part = part - before[start : start + CHUNK].to(torch.float64)
        yield part.numpy()


def remember(memory: bytes, sketches: Sketches, survivors: Sequence[int]) -> bytes:
    """Return the memory after a client has helped to open a sum for some survivors.

    Raise WireError if it has helped for other survivors when its update was nearly the same.
    """
    records = np.frombuffer(memory, RECORD, offset=SALT)
    who, new = _short(repr(sorted(survivors))), []
    for group, sketch in sketches.items():
        mine = records[records["group"] == np.void(_short(group))]
        angles = np.abs(mine["sketch"].astype(np.float64) @ sketch.astype(np.float64))
        near = mine[angles >= 1 - NEAR**2 / 2]
        if np.any(near["survivors"] != np.void(who)):
            raise WireError(
                "this client has helped to open a sum over nearly the same upload for other"
                " survivors; the two sums together could show one client's upload"
            )
        if not len(near):
            new.append((_short(group), who, sketch))
    kept = np.concatenate([records, np.array(new, RECORD)])[-MOST:]
    return memory[:SALT] + kept.tobytes()


def _short(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


# --- on disk


def with_sums(folder: Path | None, memory: NodeMemory) -> NodeMemory:
    """Return the memory of a node with what its clients remember, from the files in a folder."""
    if folder is None:
        return memory
    files = {file.stem.replace("-", ":"): file for file in folder.glob("sums-*.bin")}
    return {
        **{tag: file.read_bytes() for tag, file in files.items() if tag not in memory},
        **memory,
    }


def save_sums(folder: Path | None, before: NodeMemory, after: NodeMemory) -> None:
    """Write what has changed of what a node's clients remember, before the server gets a reply."""
    for tag, content in after.items():
        if folder is not None and tag.startswith(PREFIX) and content != before.get(tag):
            put(folder / f"{tag.replace(':', '-')}.bin", content)
