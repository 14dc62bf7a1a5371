"""Changes of an upload before it leaves its client, for every method at the same place.

Attacks and compression are such changes: they wrap the client's half of a phase, so engines and
Flower nodes apply them without knowing of them. They touch the groups in `WEIGHTS`; statistics of
batch norm, counters and all other groups are sent unchanged.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from feddkd.gradient import grad
from feddkd.method.client import Batch, Fold, Gradient
from feddkd.method.phases import Phase
from feddkd.models.functional import Model
from feddkd.tensors import Groups, Tensors, add, zeros

WEIGHTS = ("params", "gradient")
# the first streams of draws; streams below belong to networks and transforms
ATTACK, CODEC = 1 << 30, 3 << 29
LAST = "last step"  # group of the carry that holds the key of the client's last step
# (upload, sent, memo after the exchange, key) -> (upload, memo)
UploadChange = Callable[[Groups, Groups, Groups, Tensor], tuple[Groups, Groups]]


def with_change(phase: Phase, change: UploadChange) -> Phase:
    """Return the phase with every client's upload changed before it leaves.

    The key that `change` gets is that of the client's last step.
    """
    fold = phase.client
    if isinstance(fold, Gradient):
        fold = as_fold(fold)
    assert fold is not None

    def start(model: Model, sent: Groups, memo: Groups) -> Groups:
        carry = fold.start(model, sent, memo)
        like = next(t for group in (*sent.values(), *carry.values()) for t in group.values())
        return {**carry, LAST: {"key": torch.zeros((), dtype=torch.int64, device=like.device)}}

    def step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        return {**fold.step(model, sent, carry, batch), LAST: {"key": batch.key}}

    def finish(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
        upload, after = fold.finish(model, sent, carry, memo)
        return change(upload, sent, after, carry[LAST]["key"])

    return replace(phase, client=Fold(start, step, finish))


def weights_in(phase: Phase) -> list[str]:
    """Return the groups of weights that clients upload in a phase."""
    uploaded = {*phase.collect, *phase.every.values()} if phase.asks_clients else ()
    return [group for group in WEIGHTS if group in uploaded]


def as_fold(client: Gradient) -> Fold:
    """Return a fold of one step that uploads the same gradient, without a probe."""

    def start(model: Model, sent: Groups, memo: Groups) -> Groups:
        return {**memo, "gradient": zeros(sent["params"])}

    def step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        targets = client.targets(model, carry, batch)

        def loss(w: Tensors) -> Tensor:
            return client.loss(model, w, sent, carry, batch, targets)

        return {**carry, "gradient": grad(loss)(sent["params"])}

    def finish(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
        return {"gradient": carry["gradient"]}, memo

    return Fold(start, step, finish)


def moves(upload: Groups, sent: Groups) -> dict[str, Tensors]:
    """Return what an upload changes: the difference of its weights from those that were sent."""
    found = {group: upload[group] for group in WEIGHTS if upload.get(group)}
    return {
        group: add(tensors, sent[group], -1.0) if group in sent else tensors
        for group, tensors in found.items()
    }


def moved(sent: Groups, changes: Groups) -> dict[str, Tensors]:
    """Return the weights after these changes: the inverse of `moves`."""
    return {
        group: add(sent[group], tensors) if group in sent else tensors
        for group, tensors in changes.items()
    }
