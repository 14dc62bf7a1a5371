"""Logits that a client changes by its numbers of examples of each class, before the loss sees them.

Balanced softmax: Ren, Yu, Sheng, Ma, Zhao, Yi, Li, "Balanced meta-softmax for long-tailed visual
recognition", NeurIPS 2020, arXiv:2007.10740: z + log n, with n the number of examples by class.
"""

import torch
from torch import Tensor

from feddkd.models.functional import Model
from feddkd.tensors import Groups

TINY = 1e-30  # in place of no example of a class: its logit is low, and finite


def begin_with_labels(model: Model, sent: Groups, memo: Groups) -> Groups:
    """Return a group of the carry with the client's numbers of examples by class."""
    counts = memo["facts"]["labels"].to(sent["rates"]["lr"].dtype)
    return {"labels": {"count": counts}}


def by_class(logits: Tensor, values: Tensor) -> Tensor:
    """Return one value for each logit; outputs that stand for no class get zero."""
    padding = values.new_zeros(logits.shape[-1] - len(values))
    return torch.cat([values, padding])


def plus_log_counts(logits: Tensor, carry: Groups) -> Tensor:
    """Return z + log n, the logits of the balanced softmax."""
    counts = carry["labels"]["count"]
    return logits + by_class(logits, counts.clamp(min=TINY).log())
