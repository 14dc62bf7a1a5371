"""True positives, false positives and false negatives by class, and what is made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from feddkd.rounds.metrics.positions import Positions, examples, present

if TYPE_CHECKING:
    from torch import Tensor

    from feddkd.method import Batch
    from feddkd.tensors import Tensors


def outcomes(output: Tensor, batch: Batch) -> Tensors:
    """Return the outcomes of examples with one label each, or with several (see `has_many`)."""
    return by_label(output, batch) if has_many(output, batch) else by_class(examples(output, batch))


def has_many(output: Tensor, batch: Batch) -> bool:
    """Return True if an example has several labels: a target of 0 or 1 for each logit."""
    one_each = output.ndim == 2 and output.shape[1] > 1 and output.shape == batch.y.shape
    return one_each and not batch.y.is_floating_point()


def by_class(at: Positions) -> Tensors:
    """Return the outcomes of positions with one label each: the largest logit is predicted."""
    nothing = at.counts.new_zeros(at.logits.shape[-1])
    hits = nothing.scatter_add(0, at.label, at.correct)
    return {
        "true_positive": hits,
        "false_positive": nothing.scatter_add(0, at.logits.argmax(-1), at.counts) - hits,
        "false_negative": nothing.scatter_add(0, at.label, at.counts) - hits,
    }


def by_label(output: Tensor, batch: Batch) -> Tensors:
    """Return the outcomes of targets of 0 or 1; a label with a positive logit is predicted."""
    there = present(batch).unsqueeze(-1)
    true, taken = batch.y.double() * there, (output > 0) * there
    hits = (true * taken).sum(0)
    return {
        "true_positive": hits,
        "false_positive": taken.sum(0) - hits,
        "false_negative": true.sum(0) - hits,
    }


def f1(sums: Tensors) -> Tensor:
    """Return 2 TP / (2 TP + FP + FN) of each class; 0 for a class that does not occur."""
    return 2 * sums["true_positive"] / (sums["true_positive"] + _occurring(sums)).clamp(min=1)


def intersection_over_union(sums: Tensors) -> Tensor:
    """Return TP / (TP + FP + FN) of each class; 0 for a class that does not occur."""
    return sums["true_positive"] / _occurring(sums).clamp(min=1)


def _occurring(sums: Tensors) -> Tensor:
    """Return for each class how many positions have it as their label or their prediction."""
    return sums["true_positive"] + sums["false_positive"] + sums["false_negative"]


def macro_f1(sums: Tensors) -> Tensor:
    """Return the mean of F1 over the classes that are a label or a prediction."""
    return f1(sums).sum(-1) / (_occurring(sums) > 0).sum(-1)


def macro_iou(sums: Tensors) -> Tensor:
    """Return the mean of TP / (TP + FP + FN) over the classes that are a label or a prediction."""
    return intersection_over_union(sums).sum(-1) / (_occurring(sums) > 0).sum(-1)


def weighted_f1(sums: Tensors) -> Tensor:
    """Return the mean of F1 over classes, each with the number of its labels as weight."""
    support = sums["true_positive"] + sums["false_negative"]
    return (f1(sums) * support).sum(-1) / support.sum(-1)


def micro_f1(sums: Tensors) -> Tensor:
    """Return 2 TP / (2 TP + FP + FN), TP, FP and FN summed over classes."""
    hits = 2 * sums["true_positive"].sum(-1)
    return hits / (hits + sums["false_positive"].sum(-1) + sums["false_negative"].sum(-1))


def balanced_accuracy(sums: Tensors) -> Tensor:
    """Return the mean of TP / (TP + FN) over the classes that are a label."""
    support = sums["true_positive"] + sums["false_negative"]
    return (sums["true_positive"] / support.clamp(min=1)).sum(-1) / (support > 0).sum(-1)
