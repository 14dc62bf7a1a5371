"""Metrics of examples with one label each; the F1 scores and AUC also take several labels.

One logit in place of two stands for the classes 0 and 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from feddkd.errors import InputError
from feddkd.rounds.metrics import outcomes, probabilities
from feddkd.rounds.metrics.metric import Metric, register
from feddkd.rounds.metrics.positions import Positions, examples, of, present
from feddkd.rounds.metrics.ranking import histograms, mean_auc

if TYPE_CHECKING:
    from torch import Tensor

    from feddkd.method import Batch
    from feddkd.tensors import Tensors

TOP = 5


def hits(at: Positions) -> Tensors:
    """Return the number of positions that are predicted correctly, and of all."""
    return {"correct": at.correct.sum(), "count": at.counts.sum()}


def hit_rate(sums: Tensors) -> Tensor:
    """Return correct / count."""
    return sums["correct"] / sums["count"]


def _top_hits(output: Tensor, batch: Batch) -> Tensors:
    """Count examples with fewer than TOP classes whose logit is as high as that of the label."""
    at = examples(output, batch)
    lower = (at.logits < at.of_label(at.logits).unsqueeze(-1)).sum(-1)
    top = (lower >= at.logits.shape[-1] - TOP) * at.counts
    return {"correct": top.sum(), "count": at.counts.sum()}


def _loss_sums(logits: Tensor, batch: Batch) -> Tensors:
    from feddkd.methods.losses import cross_entropy

    count = present(batch).sum()
    return {"sum": cross_entropy(logits, batch).double() * count, "count": count}


def _of_two(output: Tensor, batch: Batch) -> Tensors:
    """Return the outcomes of class 1 of two."""
    found = outcomes.by_class(examples(output, batch))
    if len(found["true_positive"]) != 2:
        raise InputError(
            f"the metric f1 is that of class 1 of two, and there are {len(found['true_positive'])}:"
            " use macro_f1, weighted_f1 or micro_f1"
        )
    return {name: counts[1] for name, counts in found.items()}


def _f1(sums: Tensors) -> Tensor:
    hits = 2 * sums["true_positive"]
    return hits / (hits + sums["false_positive"] + sums["false_negative"])


ACCURACY = register(Metric("accuracy", "accuracy", of(examples, hits), hit_rate))
LOSS = register(
    Metric(
        "loss",
        "loss",
        _loss_sums,
        probabilities.mean,
        higher_is_better=False,
        percent=False,
        by_client=False,
        in_tables=False,
    )
)
register(Metric("macro_f1", "macro-F1", outcomes.outcomes, outcomes.macro_f1))
register(Metric("auc", "AUC", histograms, mean_auc, skips_undefined=True))
register(Metric("top5", "top-5 accuracy", _top_hits, hit_rate))
register(Metric("weighted_f1", "weighted F1", outcomes.outcomes, outcomes.weighted_f1))
register(Metric("micro_f1", "micro-F1", outcomes.outcomes, outcomes.micro_f1))
register(Metric("f1", "F1", _of_two, _f1, skips_undefined=True))
register(
    Metric(
        "balanced_accuracy",
        "balanced accuracy",
        of(examples, outcomes.by_class),
        outcomes.balanced_accuracy,
    )
)
register(
    Metric(
        "log_loss",
        "log loss",
        of(examples, probabilities.surprise),
        probabilities.mean,
        higher_is_better=False,
        percent=False,
    )
)
register(
    Metric(
        "calibration_error",
        "calibration error",
        of(examples, probabilities.confidences),
        probabilities.calibration_error,
        higher_is_better=False,
    )
)
