"""Messages between the pool and its workers: a pickle through a pipe, its tensors in an anonymous memory file beside it."""

import io
import os
import pickle
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    Pipe = Connection[Any, Any]
else:
    Pipe = Connection
ALIGNED = 64  # bytes: where tensors begin in a memory file


def pack(message: object) -> tuple[bytes, int]:
    """A message as (pickle, memory file). A tensor that occurs twice is written once."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(message)
    memory = os.memfd_create("feddkd")
    try:
        os.ftruncate(memory, max(pickler.size, 1))
        pages = _pages(memory)
        for tensor, place in pickler.tensors.values():
            place.open(pages).copy_(tensor)
    except BaseException:
        os.close(memory)
        raise
    return buffer.getvalue(), memory


def send(pipe: Pipe, header: bytes, memory: int) -> None:
    pipe.send_bytes(header)
    send_handle(pipe, memory, None)


def receive(pipe: Pipe) -> Any:
    header = pipe.recv_bytes()
    try:
        memory = recv_handle(pipe)
    except RuntimeError:  # its word for a message that breaks off
        raise EOFError from None
    try:
        return _Unpickler(io.BytesIO(header), _pages(memory)).load()
    finally:
        os.close(memory)


def _pages(memory: int) -> Tensor:
    """A memory file as a tensor of bytes. Python's mmap would keep a file open for each."""
    return torch.from_file(f"/proc/self/fd/{memory}", shared=True, size=os.fstat(memory).st_size, dtype=torch.uint8)


class Place(NamedTuple):
    """Where a tensor lies in a memory file."""

    offset: int
    size: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def open(self, pages: Tensor) -> Tensor:
        return pages[self.offset : self.offset + self.size].view(self.dtype).view(self.shape)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: dict[int, tuple[Tensor, Place]] = {}
        self.size = 0

    def persistent_id(self, thing: object) -> Place | None:
        if not isinstance(thing, Tensor) or thing.numel() == 0:
            return None
        if id(thing) not in self.tensors:
            size = thing.numel() * thing.element_size()
            self.tensors[id(thing)] = thing, Place(self.size, size, thing.dtype, tuple(thing.shape))
            self.size += -(-size // ALIGNED) * ALIGNED
        return self.tensors[id(thing)][1]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, pages: Tensor) -> None:
        super().__init__(file)
        self.pages = pages

    def persistent_load(self, place: Place) -> Tensor:
        return place.open(self.pages)
