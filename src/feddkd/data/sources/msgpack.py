"""A reader of msgpack, for arrays as FedJAX writes them. It runs nothing that it reads.

The format: https://github.com/msgpack/msgpack/blob/master/spec.md
"""

import struct
from typing import Any

import numpy as np

ARRAY, TEXTS = 1, 4  # FedJAX's extension types: an array of numbers, an array of bytes
# first byte -> format of a number
NUMBERS = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q",
    0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}  # fmt: skip
# first byte -> (kind, format of the length)
LENGTHS = {
    0xC4: ("bytes", ">B"), 0xC5: ("bytes", ">H"), 0xC6: ("bytes", ">I"),
    0xD9: ("text", ">B"), 0xDA: ("text", ">H"), 0xDB: ("text", ">I"),
    0xDC: ("list", ">H"), 0xDD: ("list", ">I"), 0xDE: ("map", ">H"), 0xDF: ("map", ">I"),
    0xC7: ("extension", ">B"), 0xC8: ("extension", ">H"), 0xC9: ("extension", ">I"),
}  # fmt: skip
CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
DEEPEST = 16  # maps and lists in one another


def unpack_map(content: bytes) -> dict[str, Any]:
    """Return the map that msgpack holds; raise a ValueError if it holds anything else."""
    value = _Reader(content).value()
    if not isinstance(value, dict):
        raise ValueError(f"it holds no map but {type(value).__name__}")
    return {key if isinstance(key, str) else str(key): part for key, part in value.items()}


class _Reader:
    """A position in packed bytes."""

    def __init__(self, content: bytes) -> None:
        self.content, self.at, self.depth = content, 0, 0

    def take(self, count: int) -> bytes:
        part = self.content[self.at : self.at + count]
        if len(part) < count:
            raise ValueError("it is cut short")
        self.at += count
        return part

    def number(self, kind: str) -> Any:
        return struct.unpack(kind, self.take(struct.calcsize(kind)))[0]

    def value(self) -> Any:
        first = self.number(">B")
        if first < 0x80:
            return first
        if first >= 0xE0:
            return first - 0x100
        if first in CONSTANTS:
            return CONSTANTS[first]
        if first in NUMBERS:
            return self.number(NUMBERS[first])
        if first in LENGTHS:
            kind, form = LENGTHS[first]
            return self.compound(kind, self.number(form))
        if 0xD4 <= first <= 0xD8:
            return self.compound("extension", 1 << (first - 0xD4))
        if first == 0xC1:
            raise ValueError("it has a byte that msgpack does not use")
        if first < 0x90:
            return self.compound("map", first & 0x0F)
        if first < 0xA0:
            return self.compound("list", first & 0x0F)
        return self.compound("text", first & 0x1F)

    def compound(self, kind: str, count: int) -> Any:
        if kind == "bytes":
            return self.take(count)
        if kind == "text":
            return self.take(count).decode("utf-8", "surrogateescape")
        if kind == "extension":
            return _extended(self.number(">b"), self.take(count))
        self.depth += 1
        if self.depth > DEEPEST:
            raise ValueError("it is nested too deeply")
        if kind == "list":
            found: Any = [self.value() for _ in range(count)]
        else:
            found = {self.value(): self.value() for _ in range(count)}
        self.depth -= 1
        return found


def _extended(kind: int, content: bytes) -> Any:
    """Return an array in one of FedJAX's extension types."""
    if kind not in (ARRAY, TEXTS):
        raise ValueError(f"it has an unknown extension type {kind}")
    parts = _Reader(content).value()
    if kind == TEXTS:
        return parts[1]
    shape, dtype, buffer = parts
    name = dtype.decode() if isinstance(dtype, bytes) else dtype
    if np.dtype(name).hasobject:
        raise ValueError("it holds objects")
    return np.frombuffer(buffer, np.dtype(name)).reshape(shape)
