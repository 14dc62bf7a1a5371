"""Labelled positions: the examples, pixels or tokens that have one label each."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from feddkd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from feddkd.method import Batch
    from feddkd.tensors import Tensors

    SumsOf = Callable[[Tensor, Batch], Tensors]

IGNORED = -100  # the label of positions that do not count, as in torch


class Positions(NamedTuple):
    """Positions in one line, each with its logits and one label."""

    logits: Tensor  # (positions, classes)
    label: Tensor  # (positions,), int64; 0 where the label is ignored
    counts: Tensor  # (positions,), float64: 1, or 0 for padding and ignored labels

    @property
    def correct(self) -> Tensor:
        """Return 1 for each position whose largest logit is that of its label, else 0."""
        return (self.logits.argmax(-1) == self.label) * self.counts

    @property
    def marks(self) -> Tensor:
        """Return the labels one-hot, with rows of zeros for positions that do not count."""
        import torch

        # one_hot cannot be captured in a CUDA graph
        classes = torch.arange(self.logits.shape[-1], device=self.label.device)
        return (self.label.unsqueeze(-1) == classes) * self.counts.unsqueeze(-1)

    def of_label(self, values: Tensor) -> Tensor:
        """Return the entry of each position's label, from values (positions, classes)."""
        return values.gather(-1, self.label.unsqueeze(-1)).squeeze(-1)


def present(batch: Batch) -> Tensor:
    """Return 1 for each example and 0 for padding."""
    return (batch.share > 0).double()


def examples(output: Tensor, batch: Batch) -> Positions:
    """Return examples with one label each, from logits (batch, classes).

    One logit z, of shape (batch, 1) or (batch,), stands for the two classes 0 and 1, with the
    logits 0 and z.
    """
    label = batch.y.squeeze(-1) if tuple(batch.y.shape[1:]) == (1,) else batch.y
    return _positions(output.unsqueeze(-1) if output.ndim == 1 else output, label, batch, 2)


def of(kind: Callable[..., Positions], count: Callable[[Positions], Tensors]) -> SumsOf:
    """Return the function of outputs and batch that counts something of their positions."""
    return lambda output, batch: count(kind(output, batch))


def pixels(output: Tensor, batch: Batch) -> Positions:
    """Return pixels with one label each, from logits (batch, classes, height, width)."""
    return _positions(output.movedim(1, -1), batch.y, batch, 4)


def tokens(output: Tensor, batch: Batch) -> Positions:
    """Return tokens with one label each, from logits (batch, length, vocabulary)."""
    return _positions(output, batch.y, batch, 3)


def _positions(logits: Tensor, label: Tensor, batch: Batch, axes: int) -> Positions:
    """Return the positions of logits whose last axis is that of the classes."""
    if label.is_floating_point():
        raise InputError("a metric of labels needs whole numbers as targets")
    if logits.ndim != axes or logits.shape[:-1] != label.shape:
        raise InputError(
            "a metric of labels needs one label for each"
            f" {('example', 'token', 'pixel')[axes - 2]}; the labels have the shape"
            f" {tuple(label.shape)}, the logits have {tuple(logits.shape)}, classes last"
        )
    from torch.nn.functional import pad

    if logits.shape[-1] == 1:
        logits = pad(logits, (1, 0))
    given = label != IGNORED
    counts = given * present(batch).reshape(-1, *[1] * (label.ndim - 1))
    return Positions(logits.flatten(0, -2), (label * given).long().flatten(), counts.flatten())
