"""Compression of uploads: what a client sends in place of its weights or its gradient.

    client:  u_k = x_k - w + e_k,   message = encode(u_k),   e_k <- u_k - decode(message)
    server:  x_k = w + decode(message)

w are the weights sent (0 for a gradient); e_k, the part not sent yet, stays with the client if the
codec remembers it. A group "params" travels as the groups "params:PART", one for each part of the
message; all engines put it together again at the same place, before uploads are gathered.
"""

from dataclasses import replace

from torch import Tensor

from feddkd.errors import InputError
from feddkd.method.client import Gradient
from feddkd.method.codec import Codec
from feddkd.method.phases import Phase, World
from feddkd.method.upload_changes import moved, moves, weights_in, with_change
from feddkd.models.functional import Model
from feddkd.tensors import Groups, Tensors, add, zeros


def compressed(phase: Phase, number: int, codec: Codec) -> Phase:
    """Return the phase with compressed uploads; `number` is its place in the method."""
    unsent = {group: f"unsent {group} {number}" for group in weights_in(phase)}
    if not unsent:
        return phase

    def change(upload: Groups, sent: Groups, memo: Groups, key: Tensor) -> tuple[Groups, Groups]:
        message, kept = dict(upload), dict(memo)
        for group, move in moves(upload, sent).items():
            whole = add(move, memo[unsent[group]]) if codec.remembers else move
            parts = codec.encode(whole, key)
            if codec.remembers:
                kept[unsent[group]] = add(whole, codec.decode(parts, whole), -1.0)
            del message[group]
            message |= {f"{group}:{part}": tensors for part, tensors in parts.items()}
        return message, kept

    changed = replace(with_change(phase, change), codec=codec)
    if not codec.remembers:
        return changed

    def brings(model: Model, state: Groups, world: World) -> Groups:
        others = phase.brings(model, state, world) if phase.brings else {}
        return {**others, **{name: zeros(state["params"]) for name in unsent.values()}}

    return replace(changed, brings=brings, keeps=phase.keeps | set(unsent.values()))


def opened(phase: Phase, upload: Groups, sent: Groups) -> Groups:
    """Return a client's upload before compression, computed from the message."""
    if phase.codec is None:
        return upload
    changes = {
        group: phase.codec.decode(parts, sent["params"])
        for group, parts in messages(upload).items()
    }
    others = {name: tensors for name, tensors in upload.items() if ":" not in name}
    return {**others, **moved(sent, changes)}


def messages(upload: Groups) -> dict[str, dict[str, Tensors]]:
    """Return the messages in a compressed upload, by the group that they stand for."""
    found: dict[str, dict[str, Tensors]] = {}
    for name, tensors in upload.items():
        group, colon, part = name.partition(":")
        if colon:
            found.setdefault(group, {})[part] = tensors
    return found


def problem_in(phase: Phase, upload: Groups, sent: Groups) -> str:
    """Return what is wrong with the messages in an upload from another machine, or nothing."""
    if phase.codec is None:
        return ""
    found = (phase.codec.problem(parts, sent["params"]) for parts in messages(upload).values())
    return next(filter(None, found), "")


def check_compressible(phase: Phase) -> None:
    """Raise InputError if uploads of this phase cannot be compressed."""
    problem = ""
    if phase.clip is not None:
        problem = "clip: a compressed update may be longer than the bound"
    elif phase.unfolds is not None:
        problem = "layers that change their shapes"
    elif isinstance(phase.client, Gradient) and phase.client.probe is not None:
        problem = "steps='auto': its probe must belong to the gradient that is sent"
    if problem:
        raise InputError(
            f"compression of uploads in phase {phase.name!r} does not go with {problem}"
        )
