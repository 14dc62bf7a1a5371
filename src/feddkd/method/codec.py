"""`Codec`: a way to write tensors as a smaller message."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from feddkd.tensors import Tensors

Parts = Mapping[str, Tensors]  # of a message, by name


@dataclass(frozen=True)
class Codec:
    """A way to write tensors as a smaller message. All functions are pure and work under vmap."""

    encode: Callable[[Tensors, Tensor], Parts]  # (tensors, key) -> message
    # (message, tensors with the names, shapes and types of those that were written) -> tensors
    decode: Callable[[Parts, Tensors], dict[str, Tensor]]
    # (message, the same tensors) -> what is wrong with a message from another machine, or nothing
    problem: Callable[[Parts, Tensors], str] = lambda parts, like: ""
    remembers: bool = False  # a client keeps what it has not sent, and adds it the next time
