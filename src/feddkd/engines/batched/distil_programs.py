"""How a course is taught: the teachers' answers and the gradients at shared weights as pure
functions, and those recorded.

A round's lessons are loaded into fixed places once; a step copies what is sent and its own number,
no more.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad
from torch.utils._pytree import tree_leaves, tree_map

from feddkd.engines.batched.distil_batches import Course, DistilBatch
from feddkd.engines.batched.folds import stacked
from feddkd.engines.compile.cuda_graph import Compiler, Replay, copies, fill, fill_all
from feddkd.method import Batch, Gradient
from feddkd.models.functional import Model
from feddkd.tensors import Groups, Tensors


def looped(function: Callable[..., Any]) -> Callable[..., Any]:
    """As vmap, but one after another: for networks that vmap cannot take, and where one is all
    there is.
    """

    def call(*inputs: Any) -> Any:
        count = len(tree_leaves(inputs)[0])
        results = [function(*tree_map(lambda tensor: tensor[at], inputs)) for at in range(count)]  # noqa: B023
        return tree_map(lambda *many: torch.stack(many), *results)

    return call


class Programme(NamedTuple):
    """The two functions of a course: what the teachers say in all steps, and the gradients in one."""

    teach: Callable[[list[DistilBatch]], list[Tensor]]
    slopes: Callable[[Groups, list[DistilBatch], list[Tensor], Tensor], list[Tensors]]


Over = Callable[[Callable[..., Any]], Callable[..., Any]]  # vmap, or looped


def programme(
    model: Model, client: Gradient, mean: bool, over_runs: Over, over_clients: Over
) -> Programme:
    """`mean`: the gradient of each run's mean; else, lesson by lesson, every client's own."""

    def teach(lessons: list[DistilBatch]) -> list[Tensor]:
        def own(memo: Groups, batches: Batch) -> Tensor:
            said: Tensor = over_clients(lambda batch: client.targets(model, memo, batch))(batches)
            return said

        def one(lesson: DistilBatch) -> Tensor:
            memo, batches = (
                tree_map(lambda t: t.flatten(0, 1), lesson.memo),
                tree_map(lambda t: t.flatten(1, 2), lesson.batches),
            )
            said: Tensor = over_clients(own)(memo, tree_map(lambda t: t.transpose(0, 1), batches))
            return said.transpose(0, 1).reshape(
                said.shape[1], *lesson.weight.shape, *said.shape[2:]
            )

        return [one(lesson) for lesson in lessons]

    def run(sent: Groups, lessons: list[tuple[Groups, Batch, Tensor, Tensor]]) -> list[Tensors]:
        def loss(w: Tensors, memo: Groups, batch: Batch, taught: Tensor) -> Tensor:
            return client.loss(model, w, sent, memo, batch, taught)

        def total(w: Tensors) -> Tensor:
            parts = [
                (weight * over_clients(partial(loss, w))(*lesson)).sum()
                for *lesson, weight in lessons
            ]
            return torch.stack(parts).sum()

        if mean:
            return [grad(total)(sent["params"])]
        return [
            over_clients(lambda *own: grad(loss)(sent["params"], *own))(*lesson)
            for *lesson, _ in lessons
        ]

    def slopes(
        sent: Groups, lessons: list[DistilBatch], targets: list[Tensor], step: Tensor
    ) -> list[Tensors]:
        def now(tensor: Tensor) -> Tensor:
            return tensor.index_select(0, step).squeeze(0)

        here = [
            (x.memo, tree_map(now, x.batches), now(said), x.weight)
            for x, said in zip(lessons, targets, strict=True)
        ]
        result: list[Tensors] = over_runs(run)(sent, here)
        return result

    return Programme(teach, slopes)


class RecordedCourse:
    """A course recorded: lessons, teachers' answers, what is sent and the number of the step in
    fixed places.
    """

    def __init__(
        self,
        course: Course,
        sents: Sequence[Groups],
        plan: Programme,
        fuse: Compiler | None,
        pool: Any,
    ) -> None:
        self.lessons, self.sent = tree_map(torch.clone, course.lessons), stacked(list(sents))
        self.step = torch.zeros(1, dtype=torch.int64, device=course.lessons[0].weight.device)
        self.teaching = Replay(plan.teach, (self.lessons,), fuse, pool)
        self.targets = self.teaching()
        self.differentiating = Replay(
            plan.slopes, (self.sent, self.lessons, self.targets, self.step), fuse, pool
        )
        self.names = [(group, name) for group, tensors in self.sent.items() for name in tensors]
        self.seats = [
            self.sent[group][name][run] for run in range(len(sents)) for group, name in self.names
        ]
        self.course: Course | None = course

    def load(self, course: Course) -> None:
        fill(self.lessons, course.lessons)
        self.teaching()
        self.course = course

    def slopes(self, course: Course, sents: Sequence[Groups], step: int) -> list[Tensors]:
        if self.course is not course:
            self.load(course)
        fill_all(self.seats, [sent[group][name] for sent in sents for group, name in self.names])
        self.step.fill_(step)
        result: list[Tensors] = copies(self.differentiating())
        return result
