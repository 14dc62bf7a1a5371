"""Changes of clients' examples: what differs between clients besides who holds which example.

A change is a step behind a partition: "iid() | noise(std=0.1)". It is applied once, when the data
are divided, to the examples that a client holds. So engines read changed examples like all others.
A change of examples is also applied to a client's own test and validation examples; a change of
labels only to training labels. Test examples that all clients share are not changed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from feddkd.data.index_lists import IndexLists
from feddkd.errors import InputError
from feddkd.randomness import Key
from feddkd.spec.registry import Registry, Spelled

Part = Literal["training", "test", "validation"]


class Place(NamedTuple):
    """The client whose examples are changed, and what a change may draw from."""

    client: int
    clients: int
    key: Key  # of the client; for draws that are the same in all its parts
    part: Part = "training"
    scale: float = 1.0  # the stored value that a network sees as 1
    classes: int = 0
    channels: int = 1  # of an image


@dataclass(frozen=True, eq=False)
class Change(Spelled):
    """A rule that changes what clients hold, as a function of the client and a key."""

    describe: Callable[[Place], str]  # what is changed for a client, in a few words
    examples: Callable[[Tensor, Place], Tensor] | None = None
    labels: Callable[[Tensor, Place], Tensor] | None = None  # of training examples


CHANGES: Registry[Change] = Registry("change of clients' examples", "feddkd.changes")


def places(change: int, clients: int, key: Key) -> list[Place]:
    """Return the place of each client for the change with this number."""
    return [Place(k, clients, ("change", *key, change, k)) for k in range(clients)]


def descriptions(
    changes: Sequence[Change], clients: int, key: Key, shape: Sequence[int]
) -> list[str]:
    """Return what is changed for each client, in words; `shape` is that of all examples."""
    channels = shape[1] if len(shape) == 4 else 1
    said = [
        [change.describe(place._replace(channels=channels)) for place in places(n, clients, key)]
        for n, change in enumerate(changes)
    ]
    return [", ".join(words) for words in zip(*said, strict=True)]


def apply_changes(
    changes: Sequence[Change],
    x: Tensor,
    y: Tensor,
    held: dict[Part, IndexLists],
    key: Key,
    *,
    scale: float,
    classes: int,
) -> None:
    """Change the examples and labels at the positions that clients hold, in place."""
    for part, lists in held.items():
        if len(np.unique(lists.values)) < len(lists.values):
            advice = "take another partition" if part == "training" else 'set client_tests = "own"'
            raise InputError(
                f"partition: {changes[0]} changes the examples of each client, but here clients"
                f" share {part} examples: {advice}"
            )
        for number, change in enumerate(changes):
            for place in places(number, len(lists), key):
                at = torch.from_numpy(lists[place.client])
                here = place._replace(part=part, scale=scale, classes=classes)
                if change.examples is not None:
                    x[at] = change.examples(x[at], here)
                if change.labels is not None and part == "training":
                    y[at] = change.labels(y[at], here)
