"""Who holds what: a partition divides the examples of a data set among the clients.

A partition is a value with a spelling, as `classes(per_client=6)`; called with a table of labels, a
number of clients and a key it draws a `Split`, a pure function of the three. Papers mean different
things by the same words, so every published variant has a name of its own here and says where it
comes from.
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
    """Which examples each client holds: index arrays into the training set, and, where a protocol
    says so, into the test set.
    """

    train: tuple[Indices, ...]
    # each client's own test examples; None: everybody is tested on all of them
    test: tuple[Indices, ...] | None
    text: str  # canonical spelling of the partition that made it

    @property
    def digest(self) -> str:
        """What everybody holds, in order, as one number.

        The spelling does not enter, so a saved split keeps its digest.
        """
        digest = hashlib.sha256()
        for lists in (self.train, self.test):
            sizes = [-1] if lists is None else [len(lists), *map(len, lists)]
            for array in (np.array(sizes), *(lists or ())):
                digest.update(array.astype("<i8").tobytes())
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """One .npz file, there in full or not at all."""
        arrays = {"text": np.array(self.text), "digest": np.array(self.digest)}
        for name, lists in (("train", self.train), ("test", self.test)):
            if lists is not None:
                arrays |= {
                    name: np.concatenate(lists),
                    f"{name}_sizes": np.array([len(own) for own in lists]),
                }
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
        try:
            with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                arrays = dict(file)
            test = _unpack(arrays, "test") if "test" in arrays else None
            split, digest = (
                cls(_unpack(arrays, "train"), test, str(arrays["text"])),
                str(arrays["digest"]),
            )
        # numpy and zipfile answer damaged files with a dozen kinds of exception
        except Exception as error:
            # which nobody should be told how to load
            reason = "it holds no lists" if "pickle" in str(error) else error
            raise InputError(f"cannot read a saved partition from {path}: {reason}") from error
        if digest != split.digest:
            raise InputError(
                f"the saved partition {path} is damaged: its digest does not fit its lists"
            )
        return split


def _unpack(arrays: dict[str, Indices], name: str) -> tuple[Indices, ...]:
    return tuple(np.split(arrays[name].astype(np.int64), np.cumsum(arrays[f"{name}_sizes"])[:-1]))


class Table(NamedTuple):
    """What a partition reads of a data set.

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
    own_tests: bool = False  # whether it deals out test sets, too
    identity: str = ""  # what it is called in digests, where that is not its spelling
    elsewhere: bool = False  # clients bring examples of their own, and are dealt none
    # its lists count through the whole training set, and not through the part of it meant for
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
                f"{clients} clients cannot share {len(table.labels)} training examples: take fewer"
                " clients"
            )
        train, test = self.draw(table, clients, key)
        return Split(
            self._checked("training", train, clients, len(table.labels)),
            None if test is None else self._checked("test", test, clients, len(table.test_labels)),
            self.canonical,
        )

    def _checked(self, kind: str, lists: Lists, clients: int, count: int) -> tuple[Indices, ...]:
        """Plug-ins and files are not to be trusted: one list a client, nobody empty-handed, nothing
        out of range.
        """
        if len(lists) != clients:
            raise InputError(
                f"partition {self} divides {kind} examples among {len(lists)} clients, not"
                f" {clients}"
            )
        for k, own in enumerate(lists):
            if len(own) == 0 and self.elsewhere:
                continue
            if len(own) == 0:
                raise InputError(
                    f"partition {self} leaves client {k} of {clients} without {kind} examples: take"
                    " fewer clients"
                )
            if np.min(own) < 0 or np.max(own) >= count:
                raise InputError(
                    f"partition {self} gives client {k} {kind} examples that do not exist; there"
                    f" are {count}"
                )
        return tuple(np.asarray(own, np.int64) for own in lists)


PARTITIONS: Registry[Partition] = Registry("partition", "feddkd.partitions")


def counts(split: Split, labels: Indices, classes: int) -> Indices:
    """A table clients x classes: how many training examples of each class each client holds."""
    return np.stack([np.bincount(labels[own], minlength=classes) for own in split.train])


@PARTITIONS.register
def iid() -> Partition:
    """Everybody draws from one pot: shuffled, sizes differ by at most one (McMahan et al., AISTATS
    2017, arXiv:1602.05629).
    """

    def draw(table: Table, clients: int, key: Key) -> tuple[Lists, None]:
        return (
            np.array_split(generator((*key, "iid")).permutation(len(table.labels)), clients),
            None,
        )

    return Partition(draw, "shuffled, in equal parts")


@PARTITIONS.register
def classes(
    per_client: Count = 6, form: Literal["exact", "independent", "shards", "star"] = "exact"
) -> Partition:
    """Every client sees `per_client` classes only, in one of four readings of FedDKD's "6 of 26
    classes".

    exact: disjoint, nothing left over, exactly that many classes each, as the FedDKD paper states
    the problem. independent: each client draws its classes and N/(K per_client) examples of each by
    itself; overlaps, may miss a class;
        with it the paper's figures come out.
    shards: that many label-sorted shards each, as `shards`. star: `femnist_star` of FedMAX (Chen et
    al., ECML-PKDD 2020, arXiv:2004.03657): 20 of 26 classes, `per_client` of them twice.
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
    """Sort by label, cut into K per_client shards, deal `per_client` to each client (McMahan et
    al., AISTATS 2017).
    """

    def draw(table: Table, clients: int, key: Key) -> tuple[Lists, None]:
        return (
            draw_shards(make_pools(table.labels, table.classes, key), clients, per_client, key),
            None,
        )

    return Partition(draw, f"{per_client} label-sorted shards a client")


@PARTITIONS.register
def dirichlet(
    alpha: Positive = 0.1,
    form: Literal["plain", "fedma", "fedgen"] = "plain",
    minimum: Count = 10,
    ratio: Share | None = None,
) -> Partition:
    """Each class is divided by its own draw from Dir_K(alpha), all again until the smallest client
    has the minimum.

    plain: just that, the FedDKD paper's sentence. fedma: a client that holds N/K examples gets
    nothing of later classes (Wang et al., ICLR 2020, arXiv:2002.06440, its code). fedgen: the same
    with a share `ratio` (.1 unless given) of every class; the minimum is per class; clients are
    tested on the labels they own (Zhu et al., ICML 2021, arXiv:2105.10056, its code).
    """
    if ratio is not None and form != "fedgen":
        raise InputError(
            f"partition 'dirichlet': ratio does not go with form={form!r}, only with form='fedgen'"
        )

    def draw(table: Table, clients: int, key: Key) -> tuple[Lists, Lists | None]:
        pools = make_pools(table.labels, table.classes, key)
        if form != "fedgen":
            return (
                draw_plain(
                    pools, clients, key, alpha=alpha, minimum=minimum, balance=form == "fedma"
                ),
                None,
            )
        tests = [np.flatnonzero(table.test_labels == r) for r in range(table.classes)]
        return draw_fedgen(
            pools,
            tests,
            clients,
            key,
            alpha=alpha,
            minimum=minimum,
            ratio=0.1 if ratio is None else ratio,
        )

    return Partition(
        draw,
        f"Dirichlet({alpha:g}) over clients, class by class ({form})",
        own_tests=form == "fedgen",
    )


@PARTITIONS.register
def domains() -> Partition:
    """Client k holds the k-th domain and is tested on it (FedBN: Li et al., ICLR 2021,
    arXiv:2102.07623).
    """

    def draw(table: Table, clients: int, key: Key) -> tuple[Lists, Lists]:
        if table.domains is None or table.test_domains is None:
            raise InputError("partition 'domains' needs data that come in domains; these do not")
        found = np.unique(table.domains)
        if clients != len(found):
            raise InputError(
                f"partition 'domains' makes one client of each domain: {len(found)} clients, not"
                f" {clients}"
            )
        train, test = table.domains, table.test_domains
        return [np.flatnonzero(train == d) for d in found], [
            np.flatnonzero(test == d) for d in found
        ]

    return Partition(draw, "one client a domain", own_tests=True)


@PARTITIONS.register
def elsewhere() -> Partition:
    """Nothing is divided: on a federation of Flower nodes every client brings examples of its own."""
    return Partition(
        lambda table, clients, key: ([np.arange(0)] * clients, None),
        "each client's own",
        elsewhere=True,
    )


@PARTITIONS.register
def saved(path: str) -> Partition:
    """A split from a file that `Split.save` wrote.

    It is known by what it holds, not by where it lies.
    """
    split = Split.load(Path(path))

    def draw(table: Table, clients: int, key: Key) -> tuple[Lists, Lists | None]:
        return split.train, split.test

    identity = f"saved(digest={split.digest!r})"
    return Partition(
        draw, "read from a file", own_tests=split.test is not None, identity=identity, fixed=True
    )
