"""Partitions, which divide the examples of a data set among the clients.

A partition is a value with a text, such as `classes(per_client=6)`. Called with a table of labels,
a number of clients and a key, it draws a `Split`, which is a pure function of the three. Papers use
the same words for different partitions, so every published variant has its own name, with its
source.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from feddkd.data.batches import Indices
from feddkd.data.index_lists import IndexLists
from feddkd.data.partitions.pools import Lists
from feddkd.data.partitions.split import Split as Split
from feddkd.errors import InputError
from feddkd.randomness import Key
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


def counts(split: Split, labels: Indices, classes: int) -> Indices:
    """Return the number of training examples by client and class, of shape (clients, classes)."""
    return IndexLists.of(split.train).counts(labels, classes)
