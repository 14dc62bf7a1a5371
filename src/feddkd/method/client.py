"""The client's half of an exchange: steps through its batches, or the gradient of a loss."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from feddkd.models.functional import Model
from feddkd.tensors import Groups, Tensors, only, without
from feddkd.trees import Tree, map_tensors, tensors_of


class Batch(NamedTuple):
    """The examples of one step of a client."""

    x: Tree  # the inputs: a tensor, or a tuple or a dict of tensors
    y: Tree  # the targets, for example class labels
    share: Tensor  # weights of the examples; they sum to one, and padding has weight 0
    key: Tensor  # the step's key as one whole number, for dropout

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the batch, in order."""
        return [*tensors_of(self.x), *tensors_of(self.y), self.share, self.key]

    def mapped(self, function: Callable[[Tensor], Any]) -> "Batch":
        """Return the batch with function(tensor) in place of each tensor."""
        return Batch(*map_tensors(function, tuple(self)))

    def marks(self, classes: int) -> Tensor:
        """Return the labels one-hot, shape (batch, classes), with rows of zeros for padding.

        torch's one_hot cannot be captured in a CUDA graph.
        """
        equal: Tensor = self.y.unsqueeze(-1) == torch.arange(classes, device=self.y.device)
        return (equal & (self.share > 0).unsqueeze(-1)).to(self.share.dtype)


# (model, sent, carry, memo) -> (upload, memo)
Finish = Callable[[Model, Groups, Groups, Groups], tuple[Groups, Groups]]


@dataclass(frozen=True)
class Fold:
    """A client that steps through its batches, starting from a copy of the tensors sent.

    The engine owns the loop over the batches and calls `step` once for each.
    """

    start: Callable[[Model, Groups, Groups], Groups]  # (model, sent, memo) -> carry
    step: Callable[[Model, Groups, Groups, Batch], Groups]  # (model, sent, carry, batch) -> carry
    finish: Finish
    # True if the upload is the sum of the uploads of the single batches and the memo does not
    # change: then an engine may divide a client's batches among several lanes
    sums: bool = False


Targets = Callable[[Model, Groups, Batch], Tensor]  # (model, memo, batch) -> targets, held constant
# (model, w, sent, memo, batch, targets) -> loss
Loss = Callable[[Model, Tensors, Groups, Groups, Batch, Tensor], Tensor]


@dataclass(frozen=True)
class Gradient:
    """A client that uploads the gradient of a loss at the shared weights sent["params"].

    `targets` must not depend on `sent`: an engine may compute the targets of all J steps at once.
    """

    targets: Targets
    loss: Loss
    # runs in the same exchange on the examples that reads.spare sets aside; its upload is sent
    # with the gradient
    probe: Fold | None = None


def probe_of(targets: Targets, loss: Loss) -> Fold:
    """Return a fold that uploads the loss at the shared weights, as upload["probe"]["loss"]."""

    def start(model: Model, sent: Groups, memo: Groups) -> Groups:
        return {**memo, "probe": {"loss": next(iter(sent["params"].values())).new_zeros(())}}

    def step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        value = loss(model, sent["params"], sent, carry, batch, targets(model, carry, batch))
        return {**carry, "probe": {"loss": value}}

    def finish(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
        return {"probe": carry["probe"]}, memo

    return Fold(start, step, finish)


def own_tensors(memo: Groups) -> dict[str, Tensor]:
    """Return the tensors by which the model that a client is judged by differs from the shared one.

    These are its private tensors and those of its personal model, if the method gives it one.
    """
    return {**memo.get("private", {}), **memo.get("personal", {})}


def own_model(
    model: Model, sent: Groups, memo: Groups
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a client's model, (params, buffers): the tensors sent and its private tensors."""
    private = memo.get("private", {})
    params = {**sent["params"], **only(private, model.param_names)}
    return params, {**sent["buffers"], **only(private, model.buffer_names)}


def uploads(model: Model, params: Tensors, buffers: Tensors, memo: Groups) -> tuple[Groups, Groups]:
    """Split a client's model into its upload and the memo that keeps its private tensors."""
    names = frozenset(memo.get("private", {}))
    upload = {"params": without(params, names), "buffers": without(buffers, names)}
    return upload, {**memo, "private": only({**params, **buffers}, names)} if names else dict(memo)
