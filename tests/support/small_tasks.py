"""A small federation for each task: examples, a network, and the task's mathematics once more.

`loss`, `divergence` and `weight` are written with plain loops and torch's functions, not with those
of the package: the mean of a batch, the pooled divergence of a batch, and how many positions count.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from feddkd import Task
from feddkd.data.examples import Data, from_arrays
from feddkd.data.sources.registry import SOURCES, Source
from feddkd.models.registry import MODELS, Architecture
from feddkd.tasks.lookup import TASKS

DOUBLE = torch.float64
IGNORED = -100
Draw = torch.Generator


@dataclass(frozen=True)
class SmallTask:
    """A task by its text, and what plain PyTorch says of it."""

    text: str
    targets: Callable[[Tensor, Draw], Any]  # (inputs, draw) -> targets
    loss: Callable[[Tensor, Any], Tensor]  # (outputs, targets) -> the mean of a batch
    divergence: Callable[[Tensor, Tensor, Any], Tensor]  # (teacher, student, targets)
    weight: Callable[[Any], int]  # of a client in averages, from its targets
    model: str = "task_mlp(outputs=3)"
    inputs: Callable[[int, Draw], Tensor] = lambda count, draw: torch.randn(
        count, 5, generator=draw, dtype=DOUBLE
    )

    def data(self, seed: int = 0) -> Data:
        """Return training and test examples."""
        draw = torch.Generator().manual_seed(seed)
        train, test = (self.inputs(count, draw) for count in (60, 20))
        parts = [(x, self.targets(x, draw)) for x in (train, test)]
        labelled = self.text in ("classification", "binary")
        return from_arrays(*parts, class_labels=labelled, scale=1.0)


# --- networks


class MeanOfPast(nn.Module):
    """A causal language model: each token's output reads the mean of the tokens up to it."""

    def __init__(self, vocabulary: int = 7, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        past = self.embed(tokens).cumsum(1)
        count = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        return self.head(torch.tanh(past / count[:, None]))  # type: ignore[no-any-return]


def task_mlp(*, outputs: int = 3) -> Architecture:
    """A small network with one hidden layer."""
    return Architecture(
        lambda shape, classes: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, outputs))
    )


def task_pixels() -> Architecture:
    """A small network of convolutions with three classes."""
    return Architecture(
        lambda shape, classes: nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1)
        )
    )


def task_tokens() -> Architecture:
    """A small causal language model."""
    return Architecture(lambda shape, classes: MeanOfPast())


# --- plain mathematics


def kl(p: Tensor, q: Tensor) -> Tensor:
    """Return sum_c p_c log (p_c / q_c) for distributions on the last axis."""
    return (p * (p.log() - q.log())).sum(-1)


def bernoulli_kl(p: Tensor, q: Tensor) -> Tensor:
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def counted_logits(output: Tensor, y: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Return the logits and the targets of the positions that count."""
    counts = y != IGNORED
    return output.movedim(axis, -1)[counts], y[counts]


def zero(output: Tensor) -> Tensor:
    return 0 * output.sum()


def position_loss(axis: int, marked: int) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(output: Tensor, y: Tensor) -> Tensor:
        logits, labels = counted_logits(output, y.where(y != marked, IGNORED), axis)
        return nnf.cross_entropy(logits, labels) if len(labels) else zero(output)

    return loss


def position_divergence(axis: int, marked: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def divergence(teacher: Tensor, student: Tensor, y: Tensor) -> Tensor:
        y = y.where(y != marked, IGNORED)
        p, q = (counted_logits(each, y, axis)[0].softmax(-1) for each in (teacher, student))
        return kl(p, q).mean() if len(p) else zero(student)

    return divergence


def count_without(marked: int) -> Callable[[Tensor], int]:
    return lambda y: sum(int(number not in (marked, IGNORED)) for number in y.flatten().tolist())


def regression_loss(kind: str) -> Callable[[Tensor, Tensor], Tensor]:
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "mse": lambda error: error**2,
        "mae": lambda error: error.abs(),
        "huber": lambda error: torch.where(
            error.abs() < 0.5, error**2 / 2, 0.5 * (error.abs() - 0.25)
        ),
    }
    return lambda output, y: functions[kind](output - y).mean()


def squared(teacher: Tensor, student: Tensor, y: Any) -> Tensor:
    return ((teacher - student) ** 2).sum(-1).mean()


# --- a user's own task: some of the numbers of an example are known


def known_numbers() -> Task:
    """Numbers of which some are known: targets {"value", "known"}; the mean over known numbers."""
    return Task(
        loss=lambda output, y, share: ((1 + (output - y["value"]) ** 2).sqrt() * share).sum(),
        divergence=lambda teacher, student, share: (
            ((teacher - student) ** 2).log1p() * share
        ).sum(),
        counted=lambda y: y["known"] > 0,
    )


def known_targets(x: Tensor, draw: Draw) -> dict[str, Tensor]:
    known = torch.rand(len(x), 3, generator=draw) < torch.rand(len(x), 1, generator=draw)
    known[:5] = False  # nothing of these is known
    return {"value": x[:, :3] * 2, "known": known.long()}


def known_loss(output: Tensor, y: dict[str, Tensor]) -> Tensor:
    known = y["known"] == 1
    if not known.any():
        return zero(output)
    return torch.hypot(output[known] - y["value"][known], torch.ones((), dtype=DOUBLE)).mean()


def known_divergence(teacher: Tensor, student: Tensor, y: dict[str, Tensor]) -> Tensor:
    known = y["known"] == 1
    return (1 + (teacher - student)[known] ** 2).log().mean() if known.any() else zero(student)


# --- the tasks


def whole(low: int, high: int) -> Callable[[Tensor, Draw], Tensor]:
    return lambda x, draw: torch.randint(low, high, (len(x),), generator=draw)


def masks(x: Tensor, draw: Draw) -> Tensor:
    y = (x[:, 0] > 0).long() + (x[:, 0] > 0.7).long()
    return y.where(torch.rand(y.shape, generator=draw) < 0.8, 9)


def texts(x: Tensor, draw: Draw) -> Tensor:
    """Return the next tokens; lengths are uneven, and the rest is padding with the token 0."""
    following = (x * 2 + torch.randint(0, 2, x.shape, generator=draw)) % 6 + 1
    lengths = torch.randint(1, x.shape[1] + 1, (len(x), 1), generator=draw) // 2
    return following.where(torch.arange(x.shape[1]) < lengths, 0)


def bits(x: Tensor, draw: Draw) -> Tensor:
    return (x[:, :4] + torch.randn(len(x), 4, generator=draw) > 0).long()


def binary_divergence(teacher: Tensor, student: Tensor, y: Tensor) -> Tensor:
    return bernoulli_kl(teacher.sigmoid(), student.sigmoid()).sum(-1).mean()


def of_numbers(kind: str, options: str) -> SmallTask:
    return SmallTask(
        f"regression({options})",
        lambda x, draw: x[:, :2] ** 2 + torch.randn(len(x), 2, generator=draw, dtype=DOUBLE),
        regression_loss(kind),
        squared,
        len,
        "task_mlp(outputs=2)",
    )


SMALL = {
    "classification": SmallTask(
        "classification",
        whole(0, 3),
        nnf.cross_entropy,
        lambda t, s, y: kl(t.softmax(-1), s.softmax(-1)).mean(),
        len,
    ),
    "binary": SmallTask(
        "binary",
        whole(0, 2),
        lambda z, y: -torch.where(y == 1, z[:, 0].sigmoid(), 1 - z[:, 0].sigmoid()).log().mean(),
        binary_divergence,
        len,
        "task_mlp(outputs=1)",
    ),
    "multilabel": SmallTask(
        "multilabel",
        bits,
        lambda z, y: -torch.where(y == 1, z.sigmoid(), 1 - z.sigmoid()).log().mean(),
        binary_divergence,
        len,
        "task_mlp(outputs=4)",
    ),
    "mse": of_numbers("mse", ""),
    "mae": of_numbers("mae", "loss='mae'"),
    "huber": of_numbers("huber", "loss='huber', delta=0.5"),
    "segmentation": SmallTask(
        "segmentation(ignored=9)",
        masks,
        position_loss(1, 9),
        position_divergence(1, 9),
        count_without(9),
        "task_pixels()",
        lambda count, draw: torch.randn(count, 1, 4, 5, generator=draw, dtype=DOUBLE),
    ),
    "language": SmallTask(
        "language(padding=0)",
        texts,
        position_loss(2, 0),
        position_divergence(2, 0),
        count_without(0),
        "task_tokens()",
        lambda count, draw: torch.randint(1, 7, (count, 6), generator=draw),
    ),
    "own": SmallTask(
        "known_numbers()",
        known_targets,
        known_loss,
        known_divergence,
        lambda y: int(math.fsum(y["known"].flatten().tolist())),
    ),
}


@contextmanager
def registered() -> Iterator[None]:
    """Register the networks, the own task, and `small_task(kind=...)` as data, for a while."""

    def small_task(kind: str, seed: int = 0) -> Source:
        return Source(lambda folder: SMALL[kind].data(seed), (), "made up", "", "made up")

    added: list[tuple[Any, Callable[..., Any]]] = [
        (SOURCES, small_task),
        (TASKS, known_numbers),
        *((MODELS, make) for make in (task_mlp, task_pixels, task_tokens)),
    ]
    for registry, factory in added:
        registry.register(factory)
    try:
        yield
    finally:
        for registry, factory in added:
            del registry._factories[factory.__name__]
