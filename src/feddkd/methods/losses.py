"""Loss terms: each formula of a loss stands here once.

A mean over a batch is weighted by the batch's shares (1/B each, 0 for padding). A `Term` is added
to the loss of the task at a client.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, log_softmax, softplus

from feddkd.errors import InputError
from feddkd.method import Batch
from feddkd.models.functional import Model, Output
from feddkd.tasks import formulas
from feddkd.tasks.task import Offer
from feddkd.tensors import Groups, Tensors

# (model, w, sent, carry, output at w, batch) -> scalar
Term = Callable[[Model, Tensors, Groups, Groups, Output, Batch], Tensor]
# (teacher's logits, student's logits, batch) -> scalar
Divergence = Callable[[Tensor, Tensor, Batch], Tensor]
# (model, teacher's output, student's output, batch) -> scalar
TeachingLoss = Callable[[Model, Tensor, Tensor, Batch], Tensor]
CLASSES: frozenset[Offer] = frozenset({"classes"})
FEATURES: frozenset[Offer] = frozenset({"features"})


def mean(per_example: Tensor, batch: Batch) -> Tensor:
    """Return the mean over the examples of a batch, weighted by their shares."""
    return (per_example * batch.share).sum()


def task_loss(model: Model, output: Tensor, batch: Batch) -> Tensor:
    """Return the loss of the model's task on a batch."""
    return model.task.loss(output, batch.y, model.task.shares(batch.y, batch.share))


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """Return 1/B sum_i -log softmax(z_i)[y_i]."""
    return formulas.cross_entropy(logits, batch.y, batch.share)


def distillation(
    teacher: Tensor, student: Tensor, batch: Batch, temperature: float = 1.0
) -> Tensor:
    """Return T^2/B sum_i CE(softmax(teacher_i / T), student_i / T).

    Its gradient with respect to the student is that of KL(teacher || student).
    """
    teacher, student = teacher / temperature, student / temperature
    return temperature**2 * formulas.soft_cross_entropy(teacher, student, batch.share)


def reverse_distillation(
    teacher: Tensor, student: Tensor, batch: Batch, temperature: float = 1.0
) -> Tensor:
    """Return T^2/B sum_i KL(softmax(student_i / T) || softmax(teacher_i / T))."""
    log_p = log_softmax(student / temperature, -1)
    log_q = log_softmax(teacher / temperature, -1)
    return temperature**2 * mean((log_p.exp() * (log_p - log_q)).sum(-1), batch)


def squared_distance(teacher: Tensor, student: Tensor, batch: Batch) -> Tensor:
    """Return 1/B sum_i |teacher_i - student_i|^2 of the logits: the divergence of Corollary 1."""
    return formulas.squared_distance(teacher, student, batch.share)


def task_divergence(temperature: float = 1.0) -> tuple[TeachingLoss, frozenset[Offer]]:
    """Return the divergence of the model's task, and what it needs of the task.

    Only logits of classes can have another temperature than 1.
    """
    if temperature != 1:
        return of_classes(partial(distillation, temperature=temperature)), CLASSES

    def divergence(model: Model, teacher: Tensor, student: Tensor, batch: Batch) -> Tensor:
        shares = model.task.shares(batch.y, batch.share)
        return model.task.divergence(teacher, student, shares)

    return divergence, frozenset()


def of_classes(divergence: Divergence) -> TeachingLoss:
    """Return a divergence of class logits as one that also gets the model."""
    return lambda model, teacher, student, batch: divergence(teacher, student, batch)


def proximal(mu: float, form: Literal["sum", "mean"]) -> Term:
    """Return the term mu/2 |w - w_t|^2 over the tensors that were sent.

    "mean" takes the mean square of each tensor in place of the sum.
    """

    def term(
        model: Model, w: Tensors, sent: Groups, carry: Groups, output: Output, batch: Batch
    ) -> Tensor:
        squares = [(w[name] - start) ** 2 for name, start in sent["params"].items()]
        total = sum(
            (square.sum() if form == "sum" else square.mean() for square in squares),
            output.logits.new_zeros(()),
        )
        return mu / 2 * total

    return term


def activation_entropy(beta: float, reduction: Literal["mean", "batchmean"], reverse: bool) -> Term:
    """Return the term beta KL(U || p), p = softmax(features), as a mean over the batch.

    "mean" divides it by the number D of features, too; `reverse` takes KL(p || U).
    """

    def term(
        model: Model, w: Tensors, sent: Groups, carry: Groups, output: Output, batch: Batch
    ) -> Tensor:
        if model.head is None:
            raise InputError(
                "fedmax reads the input of the last linear layer, and this network has no linear"
                " layer"
            )
        log_p = log_softmax(output.features, -1)
        size = log_p.shape[-1]
        if reverse:
            divergence = (log_p.exp() * log_p).sum(-1) + math.log(size)
        else:
            divergence = -math.log(size) - log_p.mean(-1)
        return beta * mean(divergence / (size if reduction == "mean" else 1), batch)

    return term


def linear(group: str) -> Term:
    """Return the term -<h, w>, h = carry[group]."""

    def term(
        model: Model, w: Tensors, sent: Groups, carry: Groups, output: Output, batch: Batch
    ) -> Tensor:
        products = ((h * w[name]).sum() for name, h in carry[group].items())
        return -sum(products, output.logits.new_zeros(()))

    return term


def contrast(
    features: Tensor, toward: Tensor, away: Tensor, batch: Batch, temperature: float
) -> Tensor:
    """Return the model-contrastive loss, z = features.

    1/B sum_i -log( e^(cos(z, toward)/T) / (e^(cos(z, toward)/T) + e^(cos(z, away)/T)) )
    """
    lead = cosine_similarity(features, toward, -1) - cosine_similarity(features, away, -1)
    return mean(softplus(-lead / temperature), batch)


def not_true_distillation(
    teacher: Tensor, student: Tensor, batch: Batch, temperature: float = 1.0
) -> Tensor:
    """Return the distillation among the C - 1 classes that are not an example's label."""
    index = torch.arange(student.shape[-1] - 1, device=student.device)
    others = index + (index >= batch.y[:, None])
    return distillation(teacher.gather(-1, others), student.gather(-1, others), batch, temperature)


def diversity_loss(noise: Tensor, made: Tensor) -> Tensor:
    """Return exp(-1/B^2 sum_ij d2(noise_i, noise_j) d1(made_i, made_j)).

    d2 is the mean square difference and d1 the mean absolute difference. The loss is low if
    different noise makes different outputs.
    """
    d2 = (noise.unsqueeze(0) - noise.unsqueeze(1)).square().mean(-1)
    d1 = (made.unsqueeze(0) - made.unsqueeze(1)).abs().mean(-1)
    apart = d2 * d1
    return (-apart.mean()).exp()
