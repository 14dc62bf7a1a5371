"""AUC from histograms: sums of fixed size in place of all scores."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from feddkd.rounds.metrics.outcomes import has_many
from feddkd.rounds.metrics.positions import examples, present

if TYPE_CHECKING:
    from torch import Tensor

    from feddkd.method import Batch
    from feddkd.tensors import Tensors

BINS = 1024


def histograms(output: Tensor, batch: Batch) -> Tensors:
    """Return histograms of each class's score, over its examples and over the others.

    The score is the log-odds of the softmax probability, or the logit of an example with several
    labels.
    """
    if has_many(output, batch):
        counts, bins = present(batch), _bin(output.double()).T
        true = (batch.y.double() * counts.unsqueeze(-1)).T
    else:
        at = examples(output, batch)
        true, counts, bins = at.marks.T, at.counts, _bin(_odds(at.logits)).T
    empty = true.new_zeros(len(true), BINS)
    return {
        "positive": empty.scatter_add(1, bins, true),
        "negative": empty.scatter_add(1, bins, counts - true),
    }


def _odds(logits: Tensor) -> Tensor:
    """Return log p/(1-p) + log(C-1) of each softmax probability p; 0 for p = 1/C."""
    log_p = logits.double().log_softmax(-1)
    return log_p - (-log_p.expm1()).log() + math.log(max(logits.shape[-1] - 1, 1))


def _bin(odds: Tensor) -> Tensor:
    """Return the bins of log-odds.

    Bins have equal widths in asinh(10 odds), from -10 to 10: .002 of the log-odds near 0, where an
    untrained network is, and 2 % of them far away, where a trained one is. Numbers that are not
    finite count as 0.
    """
    place = (10 * odds).nan_to_num(0.0, 1e9, -1e9).asinh().clamp(-10, 10)
    return ((place + 10) * (BINS / 20)).long().clamp(max=BINS - 1)


def mean_auc(sums: Tensors) -> Tensor:
    """Return the mean of one-vs-rest AUCs over the classes with both kinds of examples.

    AUC_c = P(score of a positive > score of a negative) + 1/2 P(both are in one bin). NaN without
    such a class. A pair in one bin is wrong by 1/2 at most: the error against an exact computation
    is below .001 with a thousand examples, below .01 with a hundred, and can be some .01 with ten.
    """
    positive, negative = sums["positive"], sums["negative"]
    below = negative.cumsum(-1) - negative / 2
    pairs = positive.sum(-1) * negative.sum(-1)
    each = (positive * below).sum(-1) / pairs.clamp(min=1)
    return each.sum(-1) / (pairs > 0).sum(-1)
