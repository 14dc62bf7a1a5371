"""Metrics of examples with several labels: logits and targets (batch, labels), targets 0 or 1.

A label is predicted where its logit is positive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from feddkd.errors import InputError
from feddkd.rounds.metrics.classification import hit_rate
from feddkd.rounds.metrics.metric import Metric, register
from feddkd.rounds.metrics.positions import present

if TYPE_CHECKING:
    from torch import Tensor

    from feddkd.method import Batch
    from feddkd.tensors import Tensors


def _right(output: Tensor, batch: Batch) -> Tensor:
    """Return whether each label of each example is predicted correctly."""
    if output.ndim != 2 or output.shape != batch.y.shape or batch.y.is_floating_point():
        raise InputError(
            "this metric needs a target of 0 or 1 for each logit; the targets have the shape"
            f" {tuple(batch.y.shape)}, the logits have {tuple(output.shape)}"
        )
    right: Tensor = (output > 0) == (batch.y > 0)
    return right


def _exact_matches(output: Tensor, batch: Batch) -> Tensors:
    there = present(batch)
    return {"correct": (_right(output, batch).all(-1) * there).sum(), "count": there.sum()}


def _right_labels(output: Tensor, batch: Batch) -> Tensors:
    right, there = _right(output, batch), present(batch)
    return {
        "correct": (right * there.unsqueeze(-1)).sum(),
        "count": there.sum() * right.shape[-1],
    }


register(Metric("exact_match", "exact match", _exact_matches, hit_rate))
register(Metric("label_accuracy", "label accuracy", _right_labels, hit_rate))
