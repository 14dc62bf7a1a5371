"""Data divided among clients, and the server's validation, test and public examples.

No other module decides which example belongs to whom.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from feddkd.data.batches import Indices, Source
from feddkd.data.examples import Data, Examples, alike
from feddkd.data.index_lists import IndexLists
from feddkd.data.partitions.changes import Change, Part, apply_changes
from feddkd.data.partitions.clusters import with_domains
from feddkd.data.partitions.own_tests import with_own_tests
from feddkd.data.partitions.registry import Partition, Split, Table
from feddkd.data.transforms import Transform
from feddkd.errors import InputError
from feddkd.randomness import Key, generator
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


def divide(
    data: Data,
    partition: Partition,
    transform: Transform,
    *,
    clients: int,
    training: float | None,
    validation: float,
    key: Key,
    public: float = 0.0,
    own_tests: bool = False,
) -> tuple[Federation, Split]:
    """Return the federation that a partition makes of some data, and its split.

    A class-stratified validation part and a public part are set aside, then the partition divides
    the training part among the clients. A fixed partition is applied first, whatever the key, and
    the other parts are drawn from the examples that it leaves. The positions in the returned split
    are those of the whole training set. With `own_tests` each client has test and validation
    examples like its training examples.
    """
    transform.check(data.train.x)
    labels = _strata(data.train, data)
    if partition.fixed:
        split = partition(_table(data, np.arange(len(labels))), clients, key)
        taken = IndexLists.of(split.train).values
        held_out, _ = stratified(labels, validation, 0.0, key, taken=taken)
        if validation and split.validation is not None:
            held_out = np.sort(IndexLists.of(split.validation).values)
        common, _ = stratified(
            labels, public, 0.0, ("public", *key), taken=np.concatenate([taken, held_out])
        )
    else:
        held_out, kept = stratified(
            labels, validation, 1.0 - validation if training is None else training, key
        )
        common = kept[:0]
        if public:
            first, rest = stratified(labels[kept], public, 1.0 - public, ("public", *key))
            common, kept = kept[first], kept[rest]
        if partition.find_domains is not None:
            read = np.concatenate([kept, held_out])
            data = with_domains(data, read, partition.find_domains, clients, key)
        drawn = partition(_table(data, kept), clients, ("partition", *key))
        train = IndexLists.of(drawn.train)
        split = replace(drawn, train=train.replaced(kept[train.values]))
    if own_tests:
        split = with_own_tests(data, split, held_out, key, partition.by_domain)
    if partition.changes:
        changes = " | ".join(change.canonical for change in partition.changes)
        split = replace(split, changed=f"{changes} {key}")
    offset = len(data.train)
    tests = None if split.test is None else IndexLists.of(split.test)
    federation = Federation(
        x=cat([data.train.x, data.test.x]),
        y=cat([data.train.y, data.test.y]),
        classes=data.classes,
        transform=transform,
        train=split.train,
        own_test=None if tests is None else tests.replaced(tests.values + offset),
        validation=held_out,
        test=np.arange(len(data.test)) + offset,
        public=common,
        own_validation=_own_validation(data, held_out, split),
    )
    if partition.changes:
        _check_changes(data, partition.changes)
        _change(federation, partition.changes, key)
    return federation, split


def _check_changes(data: Data, changes: Sequence[Change]) -> None:
    """Raise InputError if examples are not of one tensor, or have no labels to change."""
    for change in changes:
        if change.examples is not None and not isinstance(data.train.x, Tensor):
            kind = kind_in_words(data.train.x)
            raise InputError(f"{change} changes examples of one tensor; these have {kind}")
        if change.labels is not None and not data.has_labels:
            raise InputError(f"{change} changes class labels, and data {data.name!r} have none")


def _change(federation: Federation, changes: Sequence[Change], key: Key) -> None:
    """Change the examples that clients hold, in the store."""
    held: dict[Part, Sequence[Indices] | None] = {
        "training": federation.train,
        "test": federation.own_test,
        "validation": federation.own_validation,
    }
    apply_changes(
        changes,
        federation.x,
        federation.y,
        {part: IndexLists.of(lists) for part, lists in held.items() if lists is not None},
        key,
        scale=federation.transform.scale,
        classes=federation.classes,
    )


def _own_validation(data: Data, validation: Indices, split: Split) -> Sequence[Indices] | None:
    if split.test is None or not len(validation):
        return None
    if split.validation is not None:
        return split.validation
    return _like_tests(data, validation, split.test)


def _like_tests(data: Data, validation: Indices, tests: Sequence[Indices]) -> tuple[Indices, ...]:
    """Return for each client the validation examples that are like its own tests.

    They have the same shares of domains, if the data have domains, and otherwise of labels.
    The clients' sets may overlap, because no client trains on them.
    """
    kinds, test_kinds = _kinds(data.train, data), _kinds(data.test, data)
    return tuple(
        _in_shares(kinds, validation, test_kinds[test], client) for client, test in enumerate(tests)
    )


def _kinds(part: Examples, data: Data) -> Indices:
    return _strata(part, data) if part.domain is None else part.domain.numpy()


def _in_shares(kinds: Indices, validation: Indices, wanted: Indices, client: int) -> Indices:
    """Return as many validation examples as possible with each kind in the shares of `wanted`.

    Each kind has at least one example.
    """
    names, counts = np.unique(wanted, return_counts=True)
    groups = [validation[kinds[validation] == name] for name in names]
    filled = [(group, count) for group, count in zip(groups, counts, strict=True) if len(group)]
    if not filled:
        raise InputError(
            f"no validation examples are like the tests of client {client}: raise `validation`"
        )
    scale = min(len(group) / count for group, count in filled)
    chosen = [group[: max(1, round(scale * count))] for group, count in filled]
    return np.sort(np.concatenate(chosen))


def together(federations: Sequence[Federation]) -> list[Federation]:
    """Return the federations with one copy of their examples, if all have the same examples."""
    first = federations[0]
    same = all(are_equal(other.x, first.x) and are_equal(other.y, first.y) for other in federations)
    if not same:
        return list(federations)
    return [replace(other, x=first.x, y=first.y) for other in federations]


def _strata(part: Examples, data: Data) -> Indices:
    """Return the class of each example; without class labels all are of one."""
    strata: Indices = part.y.numpy() if data.has_labels else np.zeros(len(part), np.int64)
    return strata


def _table(data: Data, part: Indices) -> Table:
    """Return the table that a partition reads, of some of the training examples."""
    return Table(
        labels=_strata(data.train, data)[part],
        test_labels=_strata(data.test, data),
        domains=None if data.train.domain is None else data.train.domain.numpy()[part],
        test_domains=None if data.test.domain is None else data.test.domain.numpy(),
        classes=data.classes if data.has_labels else 0,
    )


def stratified(
    labels: Indices, first: float, second: float, key: Key, taken: Sequence[int] | Indices = ()
) -> tuple[Indices, Indices]:
    """Return two disjoint parts with the given shares of every class, each in stored order.

    If the shares add up to 1, every example is in one of the parts, except those in `taken`, which
    are in neither.
    """
    if first + second > 1 + 1e-9:
        raise InputError(
            f"validation {first:g} and training {second:g} together are more than the whole"
            " training set: lower one of them"
        )
    random = generator(("validation", *key))
    parts: tuple[list[Indices], list[Indices]] = ([np.arange(0)], [np.arange(0)])
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        free, cut = members[~np.isin(members, taken)], round(first * len(members))
        if cut > len(free):
            raise InputError(
                f"validation {first:g} needs {cut} examples of class {label}, but the partition"
                f" leaves {len(free)}"
            )
        parts[0].append(free[:cut])
        stop = len(members) if first + second > 1 - 1e-9 else cut + round(second * len(members))
        parts[1].append(free[cut:stop])
    return np.sort(np.concatenate(parts[0])), np.sort(np.concatenate(parts[1]))


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
