"""QSGD: D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnovic, "QSGD: communication-efficient SGD
via gradient quantization and encoding", NIPS 2017, arXiv:1610.02132.

    int8:  c = floor(u / s + U[0, 1)),  s = max |u| / 127 of each tensor;  the server reads s c
    bf16:  one of the two neighbours in bfloat16, so that the mean over draws is u

A piece to put after any method: `fedavg() | quantise()` sends a quarter of the bytes up. u is a
client's update, its weights less those that it was sent, or its gradient (`fedavg() | dkd() |
quantise()` compresses the J gradients of a round, too). Other groups, such as the statistics of
batch norm, are sent unchanged. Every draw has a key. The paper divides by the norm of u and codes
the whole numbers further; here each tensor is divided by its largest entry, as in the paper's
experiments, and a number takes one or two bytes.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from feddkd.method import Codec, Method, Parts
from feddkd.method.upload_changes import CODEC
from feddkd.methods.registry import METHODS
from feddkd.randomness import uniform
from feddkd.tensors import Tensors, combine

MOST = 127  # the largest code


@METHODS.register
def quantise(*, to: Literal["int8", "bf16"] = "int8") -> Method:
    """The method before it, with uploads rounded at random to a short type: E[m] = u."""
    if to == "int8":
        return Method((), codec=Codec(_as_bytes, _from_bytes, _problem))
    return Method((), codec=Codec(_as_bf16, _from_bf16))


def _drawn(tensors: Tensors, round_up: Callable[[Tensor, Tensor], Tensor], key: Tensor) -> Tensors:
    """Return round_up(tensor, uniform numbers of its shape) for each tensor."""
    return {
        name: round_up(tensors[name], uniform(key, tuple(tensors[name].shape), CODEC + number))
        for number, name in enumerate(sorted(tensors))
    }


def _as_bytes(tensors: Tensors, key: Tensor) -> Parts:
    scales = combine(_scale, tensors)

    def code(tensor: Tensor, drawn: Tensor) -> Tensor:
        scale = _scale(tensor)
        steps = tensor / torch.where(scale > 0, scale, 1) + drawn.to(tensor.dtype)
        return steps.floor().clamp(-MOST, MOST).to(torch.int8)

    return {"codes": _drawn(tensors, code, key), "scales": scales}


def _scale(tensor: Tensor) -> Tensor:
    return tensor.abs().amax() / MOST if tensor.numel() else tensor.new_zeros(())


def _from_bytes(parts: Parts, like: Tensors) -> dict[str, Tensor]:
    codes, scales = parts["codes"], parts["scales"]
    return {name: codes[name].to(scales[name].dtype) * scales[name] for name in codes}


def _problem(parts: Parts, like: Tensors) -> str:
    bad = [name for name, scale in parts["scales"].items() if not scale >= 0]
    bad += [name for name, codes in parts["codes"].items() if (codes < -MOST).any()]
    return f"the codes or the scale of {bad[0]!r} are out of range" if bad else ""


def _as_bf16(tensors: Tensors, key: Tensor) -> Parts:
    def code(tensor: Tensor, drawn: Tensor) -> Tensor:
        # bfloat16 is the upper half of a float32; a random lower half carries into it
        bits = tensor.float().view(torch.int32) + (drawn * (1 << 16)).to(torch.int32)
        return (bits & -(1 << 16)).view(torch.float32).to(torch.bfloat16)

    return {"codes": _drawn(tensors, code, key)}


def _from_bf16(parts: Parts, like: Tensors) -> dict[str, Tensor]:
    return {name: codes.to(like[name].dtype) for name, codes in parts["codes"].items()}
