"""Divide data among clients by a partition; set validation and public examples aside."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from feddkd.data.batches import Indices
from feddkd.data.examples import Data, Examples, Words
from feddkd.data.federation import Federation
from feddkd.data.index_lists import IndexLists
from feddkd.data.partitions.changes import Change, Part, apply_changes
from feddkd.data.partitions.clusters import with_domains
from feddkd.data.partitions.own_tests import with_own_tests
from feddkd.data.partitions.registry import Partition, Split, Table
from feddkd.data.transforms import Transform
from feddkd.errors import InputError
from feddkd.randomness import Key, generator
from feddkd.trees import cat, kind_in_words


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

    A class-stratified validation part and a public part are set aside (with `own_tests`, one that
    is stratified by owner if the data have owners), then the partition divides the training part
    among the clients. A fixed partition is applied first, whatever the key, and the other parts are
    drawn from the examples that it leaves. The positions in the returned split are those of the
    whole training set. With `own_tests` each client has test and validation examples like its
    training examples.
    """
    transform.check(data.train.x)
    labels = _strata(data.train, data)
    if own_tests and data.train.domain is not None:  # each owner needs validation examples
        labels = data.train.domain.numpy()
    if partition.fixed:
        split, held_out, common = _fixed(data, partition, labels, clients, validation, public, key)
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
        if not partition.fixed:  # tests that a partition deals may have another distribution
            split = replace(split, test=None)
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
        groups=_groups(data),
    )
    if partition.changes:
        _check_changes(data, partition.changes)
        _change(federation, partition.changes, key)
    return federation, split


def _fixed(
    data: Data,
    partition: Partition,
    labels: Indices,
    clients: int,
    validation: float,
    public: float,
    key: Key,
) -> tuple[Split, Indices, Indices]:
    """Return the split of a partition that comes first, and the validation and public parts."""
    split = partition(_table(data, np.arange(len(labels))), clients, key)
    taken = IndexLists.of(split.train).values
    held_out, _ = stratified(labels, validation, 0.0, key, taken=taken)
    if validation and split.validation is not None:
        held_out = np.sort(IndexLists.of(split.validation).values)
    taken = np.concatenate([taken, held_out])
    common, _ = stratified(labels, public, 0.0, ("public", *key), taken=taken)
    return split, held_out, common


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


def _groups(data: Data) -> Words | None:
    """Return the name of the group of each example in the store, None if no example has one."""
    parts = (data.train, data.test)
    if all(part.group is None for part in parts):
        return None
    named = [np.full(len(p), "") if p.group is None else p.group for p in parts]
    return np.concatenate(named)


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
