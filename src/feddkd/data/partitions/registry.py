"""Partitions, which divide the examples of a data set among the clients.

A partition is a value with a text, such as `classes(per_client=6)`. Called with a table of labels,
a number of clients and a key, it draws a `Split`, which is a pure function of the three. Papers use
the same words for different partitions, so every published variant has its own name, with its
source.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import NamedTuple

from feddkd.data.batches import Indices
from feddkd.data.index_lists import IndexLists
from feddkd.data.partitions.changes import CHANGES, Change
from feddkd.data.partitions.clusters import FindDomains
from feddkd.data.partitions.pools import Lists
from feddkd.data.partitions.split import Split as Split
from feddkd.errors import InputError
from feddkd.randomness import Key
from feddkd.spec.parser import read_calls
from feddkd.spec.registry import Registry, Spelled


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
    needs_classes: bool = False  # it divides by class, so regression has nothing for it
    by_domain: bool = False  # all examples of a client are of one domain
    find_domains: FindDomains | None = None  # finds domains among the examples, before the draw
    validation: Lists | None = None  # of each client, if the lists are read from a file
    # what differs between clients besides who holds which example
    changes: tuple[Change, ...] = ()

    @property
    def canonical(self) -> str:
        if not self.identity:
            return super().canonical
        return " | ".join([self.identity, *(change.canonical for change in self.changes)])

    def __or__(self, change: Change) -> "Partition":
        """Return the partition with one more change of the clients' examples."""
        if self.elsewhere:
            raise InputError(
                f"partition {self} has no examples that {change} could change: clients bring their"
                " own"
            )
        calls = (*self.calls, *change.calls)
        return replace(self, changes=(*self.changes, change), calls=calls)

    def __call__(self, table: Table, clients: int, key: Key) -> Split:
        if clients < 1:
            raise InputError(f"a partition needs at least one client, not {clients}")
        if clients > len(table.labels) and not self.elsewhere:
            raise InputError(
                f"{len(table.labels)} training examples are too few for {clients} clients: take"
                " fewer clients"
            )
        if self.needs_classes and not table.classes:
            raise InputError(
                f"partition {self} divides by class, and these data have no classes; iid(),"
                " quantity(), power_law(), owners(), domains() and clusters() need none"
            )
        train, test = self.draw(table, clients, key)
        return Split(
            self._checked("training", train, clients, len(table.labels)),
            None if test is None else self._checked("test", test, clients, len(table.test_labels)),
            self.canonical,
            validation=self.validation,
        )

    def _checked(self, kind: str, lists: Lists, clients: int, count: int) -> IndexLists:
        """Return the lists, or raise an InputError: a plug-in or a file may be wrong.

        There must be one list for each client, no empty list, and no position out of range.
        """
        if len(lists) != clients:
            raise InputError(
                f"partition {self} divides {kind} examples among {len(lists)} clients, not"
                f" {clients}"
            )
        held = IndexLists.of(lists)
        if not held.sizes.all() and not self.elsewhere:
            raise InputError(
                f"partition {self} leaves client {held.sizes.argmin()} of {clients} without {kind}"
                " examples: take fewer clients"
            )
        wrong = (held.values < 0) | (held.values >= count)
        if wrong.any():
            raise InputError(
                f"partition {self} gives client {held.owners[wrong.argmax()]} {kind} examples that"
                f" do not exist; there are {count}"
            )
        return held


PARTITIONS: Registry[Partition] = Registry("partition", "feddkd.partitions")


def find_partition(text: str) -> Partition:
    """Return the partition of a text such as "dirichlet(alpha=0.1) | noise(std=0.2)"."""
    (name, options), *others = read_calls("partition", text)
    if name in CHANGES and name not in PARTITIONS:
        raise InputError(
            f"{name}() changes the examples of clients and divides nothing: put it behind a"
            f" partition, as in 'iid() | {name}()'"
        )
    changes = [CHANGES[change](**given) for change, given in others]
    return reduce(or_, changes, PARTITIONS[name](**options))


def counts(split: Split, labels: Indices, classes: int) -> Indices:
    """Return the number of training examples by client and class, of shape (clients, classes)."""
    return IndexLists.of(split.train).counts(labels, classes)
