"""Log loss, perplexity and calibration: how good the probabilities are."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from feddkd.rounds.metrics.positions import Positions
    from feddkd.tensors import Tensors

BINS = 15  # of confidence, of equal width


def surprise(at: Positions) -> Tensors:
    """Return the sum of -log softmax(z)[label], in nats, and the number of positions."""
    each = -at.of_label(at.logits.double().log_softmax(-1))
    # a prediction that is no number is infinitely bad; padding is no prediction
    each = each.nan_to_num(math.inf, math.inf).where(at.counts > 0, 0)
    return {"sum": each.sum(), "count": at.counts.sum()}


def mean(sums: Tensors) -> Tensor:
    """Return sum / count."""
    return sums["sum"] / sums["count"]


def confidences(at: Positions) -> Tensors:
    """Return for each bin of confidence, the largest probability: its sum, hits and positions."""
    confidence = at.logits.double().softmax(-1).amax(-1).nan_to_num(0.0)
    bins = (confidence * BINS).long().clamp(max=BINS - 1)
    nothing = at.counts.new_zeros(BINS)
    each = {"confidence": confidence * at.counts, "correct": at.correct, "count": at.counts}
    return {name: nothing.scatter_add(0, bins, values) for name, values in each.items()}


def calibration_error(sums: Tensors) -> Tensor:
    """Return sum_b n_b/n |mean confidence - accuracy| over the bins b."""
    return (sums["confidence"] - sums["correct"]).abs().sum(-1) / sums["count"].sum(-1)
