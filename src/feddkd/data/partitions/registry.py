"""Partitions, which divide the examples of a data set among the clients.

A partition is a value with a text, such as `classes(per_client=6)`. Called with a table of labels,
a number of clients and a key, it draws a `Split`, which is a pure function of the three. Papers use
the same words for different partitions, so every published variant has its own name here, with its
source.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from feddkd.data.batches import Indices
from feddkd.data.partitions.dirichlet import draw_fedgen, draw_plain
from feddkd.data.partitions.label_skew import draw_exact, draw_independent, draw_shards, draw_star
from feddkd.data.partitions.pools import Lists, make_pools
from feddkd.errors import InputError
from feddkd.randomness import Key, generator
from feddkd.spec.registry import Registry, Spelled
from feddkd.spec.types import Count, Positive, Share


@dataclass(frozen=True, eq=False)
class Split:
    """The examples of each client, as positions in the training set.

    A partition with test sets also gives positions in the test set.
    """

    train: tuple[Indices, ...]
    # each client's own test examples; None: every client is tested on all test examples
    test: tuple[Indices, ...] | None
    text: str  # canonical text of the partition that made it

    @property
    def digest(self) -> str:
        """The sha256 over all lists in order.

        It does not depend on the partition's text, so a saved split keeps its digest.
        """
        digest = hashlib.sha256()
        for lists in (self.train, self.test):
            sizes = [-1] if lists is None else [len(lists), *map(len, lists)]
            for array in (np.array(sizes), *(lists or ())):
                digest.update(array.astype("<i8").tobytes())
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """Write the split as an .npz file, in full or not at all."""
        arrays = {"text": np.array(self.text), "digest": np.array(self.digest)}
        for name, lists in (("train", self.train), ("test", self.test)):
            if lists is not None:
                arrays[name] = np.concatenate(lists)
                arrays[f"{name}_sizes"] = np.array([len(client) for client in lists])
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with unfinished.open("wb") as file:
                np.savez(file, allow_pickle=False, **arrays)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> "Split":
        """Return the split in a file that `save` wrote."""
        try:
            with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                arrays = dict(file)
            test = _unpack(arrays, "test") if "test" in arrays else None
            split = cls(_unpack(arrays, "train"), test, str(arrays["text"]))
            digest = str(arrays["digest"])
        # numpy and zipfile raise a dozen kinds of exception for damaged files
        except Exception as error:
            # numpy's own message explains how to allow pickles, which would run the file's code
            reason = "it holds no lists" if "pickle" in str(error) else error
            raise InputError(f"cannot read a saved partition from {path}: {reason}") from error
        if digest != split.digest:
            raise InputError(
                f"the saved partition {path} is damaged: its lists do not have its digest"
            )
        return split


def _unpack(arrays: dict[str, Indices], name: str) -> tuple[Indices, ...]:
    return tuple(np.split(arrays[name].astype(np.int64), np.cumsum(arrays[f"{name}_sizes"])[:-1]))


class Table(NamedTuple):
    """The labels and domains of a data set, which are the input of a partition.

    Indices in a split are positions in `labels` and `test_labels`.
    """

    labels: Indices
    test_labels: Indices
    domains: Indices | None
    test_domains: Indices | None
    classes: int


@dataclass(frozen=True, eq=False)
class Partition(Spelled):
    """A rule that divides examples among clients."""

    # (table, number of clients, key) -> training and test lists
    draw: Callable[[Table, int, Key], tuple[Lists, Lists | None]]
    summary: str = ""
    own_tests: bool = False  # it also divides the test examples
    identity: str = ""  # the text in digests, if it is not the partition's own text
    elsewhere: bool = False  # clients have their own examples, and get none from the data set
    # the positions are those in the whole training set, and not in the part that is left for
    # clients
    fixed: bool = False

    @property
    def canonical(self) -> str:
        return self.identity or super().canonical

    def __call__(self, table: Table, clients: int, key: Key) -> Split:
        if clients < 1:
            raise InputError(f"a partition needs at least one client, not {clients}")
        if clients > len(table.labels) and not self.elsewhere:
            raise InputError(
                f"{len(table.labels)} training examples are too few for {clients} clients: take"
                " fewer clients"
            )
        train, test = self.draw(table, clients, key)
        return Split(
            self._checked("training", train, clients, len(table.labels)),
            None if test is None else self._checked("test", test, clients, len(table.test_labels)),
            self.canonical,
        )

    def _checked(self, kind: str, lists: Lists, clients: int, count: int) -> tuple[Indices, ...]:
        """Return the lists, or raise an InputError: a plug-in or a file may be wrong.

        There must be one list for each client, no empty list, and no position out of range.
        """
        if len(lists) != clients:
            raise InputError(
                f"partition {self} divides {kind} examples among {len(lists)} clients, not"
                f" {clients}"
            )
        for k, client in enumerate(lists):
            if len(client) == 0 and self.elsewhere:
                continue
            if len(client) == 0:
                raise InputError(
                    f"partition {self} leaves client {k} of {clients} without {kind} examples: take"
                    " fewer clients"
                )
            if np.min(client) < 0 or np.max(client) >= count:
                raise InputError(
                    f"partition {self} gives client {k} {kind} examples that do not exist; there"
                    f" are {count}"
                )
        return tuple(np.asarray(client, np.int64) for client in lists)


PARTITIONS: Registry[Partition] = Registry("partition", "feddkd.partitions")


def counts(split: Split, labels: Indices, classes: int) -> Indices:
    """Return the number of training examples by client and class, of shape (clients, classes)."""
    return np.stack([np.bincount(labels[client], minlength=classes) for client in split.train])


@PARTITIONS.register
def iid() -> Partition:
    """Shuffle all examples and give each client an equal part; sizes differ by at most one.

    McMahan et al., AISTATS 2017, arXiv:1602.05629.
    """

    def draw(table: Table, clients: int, key: Key) -> tuple[Lists, None]:
        order = generator((*key, "iid")).permutation(len(table.labels))
        return np.array_split(order, clients), None

    return Partition(draw, "shuffled, in equal parts")


@PARTITIONS.register
def classes(
    per_client: Count = 6, form: Literal["exact", "independent", "shards", "star"] = "exact"
) -> Partition:
    """Give each client `per_client` classes, in one of four readings of FedDKD's "6 of 26 classes".

    exact: disjoint lists of exactly that number of classes, which use every example, as the FedDKD
        paper states the problem.
    independent: each client draws its classes, and N/(K per_client) examples of each, independently
        of the others; clients' lists overlap and may miss a class. It reproduces the paper's
        figures.
    shards: that number of label-sorted shards for each client, as in `shards`.
    star: `femnist_star` of FedMAX (Chen et al., ECML-PKDD 2020, arXiv:2004.03657): 20 of 26
        classes, `per_client` of them twice.
    """
    rule = {
        "exact": draw_exact,
        "independent": draw_independent,
        "shards": draw_shards,
        "star": draw_star,
    }[form]

    def draw(table: Table, clients: int, key: Key) -> tuple[Lists, None]:
        if per_client > table.classes:
            raise InputError(
                f"a client cannot hold {per_client} classes of {table.classes}: lower per_client"
            )
        return rule(make_pools(table.labels, table.classes, key), clients, per_client, key), None

    return Partition(draw, f"{per_client} classes a client ({form})")


@PARTITIONS.register
def shards(per_client: Count = 2) -> Partition:
    """Sort by label, cut into K per_client shards, and give each client `per_client` of them.

    McMahan et al., AISTATS 2017.
    """

    def draw(table: Table, clients: int, key: Key) -> tuple[Lists, None]:
        pools = make_pools(table.labels, table.classes, key)
        return draw_shards(pools, clients, per_client, key), None

    return Partition(draw, f"{per_client} label-sorted shards a client")


@PARTITIONS.register
def dirichlet(
    alpha: Positive = 0.1,
    form: Literal["plain", "fedma", "fedgen"] = "plain",
    minimum: Count = 10,
    ratio: Share | None = None,
) -> Partition:
    """Divide each class by its own draw from Dir_K(alpha).

    All classes are drawn again until the smallest client has the minimum.

    plain: nothing else, as the FedDKD paper says.
    fedma: a client that holds N/K examples gets nothing of later classes (Wang et al., ICLR 2020,
        arXiv:2002.06440, its code).
    fedgen: as fedma, with a share `ratio` (.1 if not given) of every class; the minimum is for each
        class; clients are tested on the labels that they hold (Zhu et al., ICML 2021,
        arXiv:2105.10056, its code).
    """
    if ratio is not None and form != "fedgen":
        raise InputError(
            f"partition 'dirichlet': ratio does not go with form={form!r}, only with form='fedgen'"
        )

    def draw(table: Table, clients: int, key: Key) -> tuple[Lists, Lists | None]:
        pools = make_pools(table.labels, table.classes, key)
        if form != "fedgen":
            balance = form == "fedma"
            lists = draw_plain(pools, clients, key, alpha=alpha, minimum=minimum, balance=balance)
            return lists, None
        tests = [np.flatnonzero(table.test_labels == r) for r in range(table.classes)]
        share = 0.1 if ratio is None else ratio
        return draw_fedgen(pools, tests, clients, key, alpha=alpha, minimum=minimum, ratio=share)

    summary = f"Dirichlet({alpha:g}) over clients, class by class ({form})"
    return Partition(draw, summary, own_tests=form == "fedgen")


@PARTITIONS.register
def domains() -> Partition:
    """Give client k the k-th domain, and test it on that domain.

    FedBN: Li et al., ICLR 2021, arXiv:2102.07623.
    """

    def draw(table: Table, clients: int, key: Key) -> tuple[Lists, Lists]:
        if table.domains is None or table.test_domains is None:
            raise InputError("partition 'domains' needs data with domains; these have none")
        names = np.unique(table.domains)
        if clients != len(names):
            raise InputError(
                f"partition 'domains' makes one client of each domain: {len(names)} clients, not"
                f" {clients}"
            )
        train = [np.flatnonzero(table.domains == name) for name in names]
        return train, [np.flatnonzero(table.test_domains == name) for name in names]

    return Partition(draw, "one client a domain", own_tests=True)


@PARTITIONS.register
def elsewhere() -> Partition:
    """Divide nothing: in a federation of Flower nodes every client has its own examples."""

    def draw(table: Table, clients: int, key: Key) -> tuple[Lists, None]:
        return [np.arange(0)] * clients, None

    return Partition(draw, "each client's own", elsewhere=True)


@PARTITIONS.register
def saved(path: str) -> Partition:
    """Read the split from a file that `Split.save` wrote.

    In digests it has the name of its lists, and not of its file.
    """
    split = Split.load(Path(path))

    def draw(table: Table, clients: int, key: Key) -> tuple[Lists, Lists | None]:
        return split.train, split.test

    identity, own_tests = f"saved(digest={split.digest!r})", split.test is not None
    return Partition(draw, "read from a file", own_tests=own_tests, identity=identity, fixed=True)
