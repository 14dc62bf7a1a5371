"""Groups of tensors as bytes, and back with distrust: what comes from elsewhere is measured before
it is used.

The bytes are a safetensors file: nothing in it can run, types and shapes travel as they are
(float64, counters, rates without axes), and a whole message is one object, since every object costs
Flower a request of its own.
"""

import json

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from feddkd.tensors import Groups, Tensors

FIRST, NOTHING = "", "nothing"  # tags: what a client begins with; nothing at all
MOST = 1 << 30  # bytes of tensors in one message, unless said


class WireError(ValueError):
    """Bytes or tensors from elsewhere that are not what they should be."""


def pack(groups: Groups) -> bytes:
    """Groups as bytes; empty ones are there, too."""
    tensors = {
        f"{group}/{name}": tensor for group, own in groups.items() for name, tensor in own.items()
    }
    alone = {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()
    }
    return save(alone, metadata={"groups": json.dumps(list(groups))})


def unpack(content: bytes, most: int = MOST) -> Groups:
    if len(content) > most:
        raise WireError(f"{len(content):,} bytes, and {most:,} are the most")
    try:
        names = json.loads(_header(content)["__metadata__"]["groups"])
        groups: dict[str, dict[str, torch.Tensor]] = {str(name): {} for name in names}
        for name, tensor in load(content).items():
            group, _, own = name.partition("/")
            groups[group][own] = tensor
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise WireError(f"no groups of tensors: {error!r}") from None
    return groups


def _header(content: bytes) -> dict[str, dict[str, str]]:
    length = int.from_bytes(content[:8], "little")
    return dict(json.loads(content[8 : 8 + length]))


def check(groups: Groups, pattern: Groups, finite: bool = True) -> Groups:
    """The names, shapes and types of the pattern, and, if asked for, every number finite. Returned
    in the pattern's order, in which noise is drawn; a safetensors file has one of its own.
    """
    _same("groups", groups, pattern)
    for group, own in groups.items():
        _same(f"tensors in {group!r}", own, pattern[group])
        for name, tensor in own.items():
            _check_tensor(f"{group}/{name}", tensor, pattern[group][name], finite)
    return {group: {name: groups[group][name] for name in own} for group, own in pattern.items()}


def _same(what: str, found: Groups | Tensors, wanted: Groups | Tensors) -> None:
    if set(found) != set(wanted):
        raise WireError(f"the {what} are {sorted(found)}, and should be {sorted(wanted)}")


def _check_tensor(path: str, tensor: torch.Tensor, like: torch.Tensor, finite: bool) -> None:
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        kinds = [f"{tuple(one.shape)} {one.dtype}" for one in (tensor, like)]
        raise WireError(f"{path} is {kinds[0]}, and should be {kinds[1]}")
    if finite and tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        raise WireError(f"{path} holds NaN or infinite numbers")
