"""The formulas of losses and divergences: means weighted by shares."""

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, log_softmax, softmax
from torch.nn.functional import cross_entropy as torch_cross_entropy

from feddkd.tasks.task import IGNORED


def cross_entropy(logits: Tensor, label: Tensor, share: Tensor) -> Tensor:
    """Return sum_i s_i -log softmax(z_i)[y_i], for logits (N, C)."""
    return (torch_cross_entropy(logits, label, reduction="none") * share).sum()


def soft_cross_entropy(teacher: Tensor, student: Tensor, share: Tensor) -> Tensor:
    """Return sum_i s_i CE(softmax(teacher_i), student_i), the classes on the last axis.

    Its gradient with respect to the student is that of KL(teacher || student).
    """
    taught = softmax(teacher, -1)
    return (-(taught * log_softmax(student, -1)).sum(-1) * share).sum()


def position_cross_entropy(logits: Tensor, label: Tensor, share: Tensor) -> Tensor:
    """Return the cross-entropy over positions, for logits (N, ..., C) and labels (N, ...)."""
    each = torch_cross_entropy(
        logits.flatten(0, -2), label.flatten(), reduction="none", ignore_index=IGNORED
    )
    return (each * share.flatten()).sum()


def binary_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return -t log p - (1 - t) log (1 - p), p = sigmoid(z), for each logit."""
    return binary_cross_entropy_with_logits(logits, target.to(logits.dtype), reduction="none")


def by_example(values: Tensor) -> Tensor:
    """Return values as (N, numbers of an example)."""
    return values.reshape(len(values), -1)


def soft_binary_cross_entropy(teacher: Tensor, student: Tensor, share: Tensor) -> Tensor:
    """Return sum_i s_i sum_l CE(sigmoid(teacher_il), student_il).

    Its gradient with respect to the student is that of the sum of the Bernoulli KL divergences.
    """
    each = binary_cross_entropy(student, torch.sigmoid(teacher))
    return (by_example(each).sum(-1) * share).sum()


def squared_distance(teacher: Tensor, student: Tensor, share: Tensor) -> Tensor:
    """Return sum_i s_i |teacher_i - student_i|^2."""
    return (by_example((student - teacher) ** 2).sum(-1) * share).sum()
