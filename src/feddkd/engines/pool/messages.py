"""Messages between the pool and its workers.

A message is a pickle that goes through a pipe. Its tensors lie in an anonymous memory file.
"""

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
ALIGNED = 64  # tensors begin at multiples of this number of bytes


def pack(message: object) -> tuple[bytes, int | None]:
    """Return a message as (pickle, memory file); without tensors the memory file is None.

    A tensor that occurs twice is written once.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(message)
    if not pickler.tensors:
        return buffer.getvalue(), None
    memory = os.memfd_create("feddkd")
    try:
        os.ftruncate(memory, pickler.size)
        pages = _pages(memory)
        for tensor, slot in pickler.tensors.values():
            slot.open(pages).copy_(tensor)
    except BaseException:
        os.close(memory)
        raise
    return buffer.getvalue(), memory


def send(pipe: Pipe, header: bytes, memory: int | None) -> None:
    pipe.send_bytes(header)
    if memory is not None:
        send_handle(pipe, memory, None)


def close(memory: int | None) -> None:
    if memory is not None:
        os.close(memory)


def receive(pipe: Pipe) -> Any:
    return _Unpickler(io.BytesIO(pipe.recv_bytes()), pipe).load()


def _receive_pages(pipe: Pipe) -> Tensor:
    try:
        memory = recv_handle(pipe)
    except RuntimeError:  # raised for a message that is cut off
        raise EOFError from None
    try:
        return _pages(memory)
    finally:
        os.close(memory)


def _pages(memory: int) -> Tensor:
    """Return a memory file as a tensor of bytes; Python's mmap would keep the file open."""
    return torch.from_file(
        f"/proc/self/fd/{memory}", shared=True, size=os.fstat(memory).st_size, dtype=torch.uint8
    )


class TensorSlot(NamedTuple):
    """The place of a tensor in a memory file."""

    offset: int
    size: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def open(self, pages: Tensor) -> Tensor:
        return pages[self.offset : self.offset + self.size].view(self.dtype).view(self.shape)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: dict[int, tuple[Tensor, TensorSlot]] = {}
        self.size = 0

    def persistent_id(self, value: object) -> TensorSlot | None:
        if not isinstance(value, Tensor) or value.numel() == 0:
            return None
        if id(value) not in self.tensors:
            size = value.numel() * value.element_size()
            slot = TensorSlot(self.size, size, value.dtype, tuple(value.shape))
            self.tensors[id(value)] = value, slot
            self.size += -(-size // ALIGNED) * ALIGNED
        return self.tensors[id(value)][1]


class _Unpickler(pickle.Unpickler):
    """Reads a message; at the first tensor it receives the memory file."""

    def __init__(self, file: io.BytesIO, pipe: Pipe) -> None:
        super().__init__(file)
        self.pipe = pipe
        self.pages: Tensor | None = None

    def persistent_load(self, slot: TensorSlot) -> Tensor:
        if self.pages is None:
            self.pages = _receive_pages(self.pipe)
        return slot.open(self.pages)
