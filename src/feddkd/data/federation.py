"""Data divided among clients, and the server's validation, test and public examples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from feddkd.data.batches import Indices, Source
from feddkd.data.examples import Examples, Words, alike
from feddkd.data.index_lists import IndexLists
from feddkd.data.transforms import Transform
from feddkd.errors import InputError
from feddkd.tasks.task import Task
from feddkd.trees import (
    Tree,
    are_equal,
    cat,
    first_tensor,
    kind_in_words,
    kind_of,
    map_tensors,
    take,
)

# the number of the server in an evaluation, in which it answers like a client that holds the
# validation and test sets
SERVER = -1


@dataclass(frozen=True)
class Federation:
    """All examples in one store, and lists of the positions that each client reads.

    The examples have the type that they have on disk: pixels are uint8.
    """

    x: Tree
    y: Tree
    classes: int
    transform: Transform
    train: Sequence[Indices]
    # each client's own test examples; None: clients are tested on all of `test`
    own_test: Sequence[Indices] | None
    validation: Indices
    test: Indices
    # held by the server; every client may read them
    public: Indices = field(default_factory=lambda: np.arange(0))
    # for each client, the part of `validation` that is like its own_test
    own_validation: Sequence[Indices] | None = None
    # how many positions of each example in the store count in means; None: one in each
    units: Indices | None = None
    # the name of the group of each example in the store, which is empty without one; None: of none
    groups: Words | None = None

    def __repr__(self) -> str:
        trained, tested = sum(self.sizes), len(self.test)
        return f"<{len(self.train)} clients: {trained} training, {tested} test examples>"

    @property
    def device(self) -> torch.device:
        return first_tensor(self.x).device

    @property
    def shape(self) -> Any:
        """The shape of one example as a network sees it; a tree of shapes for several tensors."""
        seen = self.transform(take(self.x, slice(1)), torch.float32)
        return map_tensors(lambda tensor: tuple(tensor.shape[1:]), seen)

    @cached_property
    def sizes(self) -> list[int]:
        """The number of training examples of each client."""
        sizes: list[int] = IndexLists.of(self.train).sizes.tolist()
        return sizes

    @cached_property
    def pooled(self) -> Indices:
        """The positions of all clients' training examples, client after client."""
        return IndexLists.of(self.train).values

    @property
    def parts(self) -> list[Indices]:
        """All index lists: together, the examples that a client or the server may read."""
        return [*self.train, *(self.own_test or ()), self.validation, self.test, self.public]

    @property
    def held(self) -> Indices:
        """The number of training examples by client and class, of shape (clients, classes)."""
        return IndexLists.of(self.train).counts(self.y.cpu().numpy(), self.classes)

    def held_by(self, labels: Sequence[str]) -> tuple[tuple[str, ...], Indices]:
        """Return the names of what is counted of each client, and the numbers by client and name.

        These are the training examples of each class; without labels, of all kinds together.
        """
        if labels:
            return tuple(labels), self.held
        return ("examples",), np.array(self.sizes)[:, None]

    def counts(self, source: Source) -> list[int]:
        """Return the number of examples that each client has of a source."""
        if source == "train":
            return self.sizes
        return [len(self.indices(source, client)) for client in range(len(self.train))]

    def weight(self, source: Source, client: int) -> int:
        """Return the weight of a client in means: its examples, or their positions that count."""
        indices = self.indices(source, client)
        return len(indices) if self.units is None else int(self.units[indices].sum())

    def weights(self, source: Source) -> list[int]:
        """Return the weight of each client in means."""
        if self.units is None:
            return self.counts(source)
        return [self.weight(source, client) for client in range(len(self.train))]

    def indices(self, source: Source, client: int) -> Indices:
        """Return the positions in the store of a client's or the server's examples."""
        if source == "train":
            return self.train[client]
        if source == "train+public":
            return np.concatenate([self.train[client], self.public])
        if source == "public":
            return self.public
        if source == "pooled":
            return self.pooled
        if source == "none":
            return np.arange(1)
        common, by_client = {
            "test": (self.test, self.own_test),
            "validation": (self.validation, self.own_validation),
        }[source]
        return common if client == SERVER or by_client is None else by_client[client]

    def for_task(self, task: Task, dtype: torch.dtype) -> "Federation":
        """Return the federation with its targets as a task learns them, and what counts of them."""
        y = task.learned(self.y, dtype)
        units = task.units(y)
        return replace(self, y=y, units=None if units is None else units.cpu().numpy())

    def to(self, device: torch.device) -> "Federation":
        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device)

        return replace(self, x=map_tensors(moved, self.x), y=map_tensors(moved, self.y))


def together(federations: Sequence[Federation]) -> list[Federation]:
    """Return the federations with one copy of their examples, if all have the same examples."""
    first = federations[0]
    same = all(are_equal(other.x, first.x) and are_equal(other.y, first.y) for other in federations)
    if not same:
        return list(federations)
    return [replace(other, x=first.x, y=first.y) for other in federations]


def assemble(
    clients: Sequence[Examples],
    test: Examples | None,
    validation: Examples | None,
    transform: Transform,
    public: Examples | None = None,
    client_tests: Sequence[Examples] = (),
) -> Federation:
    """Return the federation of examples that are already divided among clients.

    Without `test`, the test set is that of all clients together.
    """
    if not clients:
        raise InputError("there must be at least one client")
    others = {"test": test, "validation": validation, "public": public}
    given = {name: part for name, part in others.items() if part is not None}
    parts = alike([*clients, *client_tests, *given.values()])
    _check_alike(parts)
    whole = Examples(cat([part.x for part in parts]), cat([part.y for part in parts]))
    sizes = [len(part) for part in parts]
    ends = len(clients), len(clients) + len(client_tests)
    named = dict(zip(given, sizes[ends[1] :], strict=True))
    return of_parts(whole, sizes[: ends[0]], sizes[ends[0] : ends[1]], named, transform)


def of_parts(
    whole: Examples,
    clients: Sequence[int],
    client_tests: Sequence[int],
    others: Mapping[str, int],
    transform: Transform,
) -> Federation:
    """Return the federation of examples that lie one part after the other.

    The sizes of the parts: those of the clients, of their tests, and of the others by name.
    """
    positions, trained, tested = np.arange(len(whole)), sum(clients), sum(client_tests)
    ends = np.cumsum([trained + tested, *others.values()])
    named = dict(zip(others, np.split(positions, ends)[1:-1], strict=True))
    own, y = positions[trained : trained + tested], whole.y
    has_labels = isinstance(y, Tensor) and y.dim() == 1 and not y.is_floating_point()
    return Federation(
        x=whole.x,
        y=y,
        classes=int(y.max()) + 1 if has_labels else 0,
        transform=transform,
        train=IndexLists(positions[:trained], clients),
        own_test=IndexLists(own, client_tests) if client_tests else None,
        validation=named.get("validation", positions[:0]),
        test=named.get("test", own),
        public=named.get("public", positions[:0]),
    )


def _check_alike(parts: Sequence[Examples]) -> None:
    for part in parts:
        if len(part) == 0:
            raise InputError(
                "every client and the test set must hold at least one example; one of them is empty"
            )
        if kind_of(part.x) != kind_of(parts[0].x):
            raise InputError(
                "all examples must have one shape and type; some are"
                f" {kind_in_words(parts[0].x)}, others {kind_in_words(part.x)}"
            )
        if kind_of(part.y) != kind_of(parts[0].y):
            raise InputError(
                "all targets must have one shape and type; some are"
                f" {kind_in_words(parts[0].y)}, others {kind_in_words(part.y)}"
            )
