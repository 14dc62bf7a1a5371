"""Writes groups of tensors as bytes, and reads bytes from other machines with checks.

The bytes are a safetensors file: reading it runs no code, types and shapes do not change (float64,
counters, rates without axes), and all tensors of a message are one object, because Flower makes a
separate request for every object.
"""

import json

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from feddkd.tensors import Groups, Tensors

# Tags of the tensors that a client holds: those that it starts with, and none at all.
FIRST, NOTHING = "", "nothing"
MOST = 1 << 30  # the default limit of the bytes of tensors in one message
NodeMemory = dict[str, bytes]  # what a node keeps between messages: tag -> packed groups


LONGEST_TEXT = 300  # characters of a text from another machine that are shown
MOST_HEADER = 4 << 20  # bytes of the header of packed tensors


class WireError(ValueError):
    """A message, bytes or tensors from another machine are not as they should be."""


def printable(text: object) -> str:
    """Return a text from another machine for the terminal and the log: short and on one line.

    Control characters, such as those that move the cursor, are written as escapes.
    """
    shown = str(text)[: LONGEST_TEXT + 1]
    escaped = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in shown[:LONGEST_TEXT]
    )
    return escaped + ("..." if len(shown) > LONGEST_TEXT else "")


def pack(groups: Groups) -> bytes:
    """Return groups as bytes; empty groups are kept, too."""
    named = {
        f"{group}/{name}": tensor
        for group, tensors in groups.items()
        for name, tensor in tensors.items()
    }
    seen: set[int] = set()
    apart = {name: _apart(tensor, seen) for name, tensor in named.items()}
    return save(apart, metadata={"groups": json.dumps(list(groups))})


def _apart(tensor: torch.Tensor, seen: set[int]) -> torch.Tensor:
    """Return a tensor on the CPU; a copy only if its memory is among those seen, which is extended.

    safetensors refuses tensors that share memory, and a large model should not be copied twice.
    """
    here = tensor.detach().cpu().contiguous()
    memory = here.untyped_storage().data_ptr()
    if memory in seen:
        return here.clone()
    seen.add(memory)
    return here


def unpack(content: bytes, most: int = MOST) -> Groups:
    """Return the groups in some bytes, or raise WireError if there are none or too many bytes."""
    if len(content) > most:
        raise WireError(f"the tensors have {len(content):,} bytes; at most {most:,} are allowed")
    try:
        names = json.loads(_header(content)["__metadata__"]["groups"])
        groups: dict[str, dict[str, torch.Tensor]] = {str(name): {} for name in names}
        for path, tensor in load(content).items():
            group, _, name = path.partition("/")
            groups[group][name] = tensor
    except WireError:
        raise
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"the bytes are not groups of tensors: {error!r}") from None
    return groups


def _header(content: bytes) -> dict[str, dict[str, str]]:
    length = int.from_bytes(content[:8], "little")
    if length > MOST_HEADER:
        raise WireError(f"the tensors have a header of {length:,} bytes; at most {MOST_HEADER:,}")
    return dict(json.loads(content[8 : 8 + length]))


def check(groups: Groups, pattern: Groups, finite: bool = True) -> Groups:
    """Return the groups if their names, shapes and types are the pattern's; else raise WireError.

    With `finite`, every number must be finite. The result has the order of the pattern, because
    noise is drawn in that order; a safetensors file may have another.
    """
    _check_names("groups", groups, pattern)
    for group, like in pattern.items():
        _check_names(f"tensors in {group!r}", groups[group], like)
        for name, tensor in like.items():
            _check_tensor(f"{group}/{name}", groups[group][name], tensor, finite)
    return {group: {name: groups[group][name] for name in like} for group, like in pattern.items()}


def _check_names(what: str, found: Groups | Tensors, wanted: Groups | Tensors) -> None:
    if set(found) != set(wanted):
        raise WireError(f"the {what} are {sorted(found)}; they should be {sorted(wanted)}")


def _check_tensor(path: str, tensor: torch.Tensor, like: torch.Tensor, finite: bool) -> None:
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise WireError(
            f"{path} is {tuple(tensor.shape)} {tensor.dtype}; it should be"
            f" {tuple(like.shape)} {like.dtype}"
        )
    if finite and tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        raise WireError(f"{path} holds NaN or infinite numbers")
