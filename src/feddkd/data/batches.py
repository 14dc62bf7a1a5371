"""Which examples a client reads, when: a pure function of a key."""

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import numpy as np
import numpy.typing as npt

from feddkd.randomness import Key, generator

Indices = npt.NDArray[np.int64]
# public: what the server holds and everybody may see. none: nothing; a step then finds one example
# that means nothing.
Source = Literal["train", "validation", "test", "public", "train+public", "none"]


@dataclass(frozen=True)
class Reads:
    """How a client goes through its examples in one exchange: so many epochs, or so many
    mini-batches.
    """

    batch_size: int
    epochs: int = 1
    # instead of epochs: this many mini-batches, epoch after epoch until there are enough
    steps: int | None = None
    source: Source = "train"
    # shuffled, and augmented where the transform says so; else in stored order and as in testing
    random: bool = True
    # or else, though augmented, in stored order: a round goes on where the one before it ended
    shuffle: bool = True
    drop_last: bool = False  # leave out an epoch's partial batch, unless it is the only one
    spare: int = 0  # so many examples, others in every round, are set aside and not read
    aside: bool = False  # read what is set aside instead, in one batch

    def batches_an_epoch(self, examples: int) -> int:
        whole = examples // self.batch_size
        return max(whole, 1) if self.drop_last else math.ceil(examples / self.batch_size)

    def count(self, examples: int) -> int:
        """Mini-batches read in one exchange by a client with so many examples."""
        return self.epochs * self.batches_an_epoch(examples) if self.steps is None else self.steps

    def sizes(self, examples: int, first: int = 0) -> list[int]:
        """Of those mini-batches, from the epoch's `first` on: all are full but an epoch's last."""
        each, end = self.batches_an_epoch(examples), first + self.count(examples)
        epoch = [self.batch_size] * (each - 1) + [
            min(self.batch_size, examples - (each - 1) * self.batch_size)
        ]
        return (epoch * -(-end // each))[first:end]

    def first(self, examples: int, key: Key) -> int:
        """With which mini-batch of an epoch an exchange begins: as if the client had taken part in
        every round.

        Where a round has several exchanges, as in DKD, the next round begins one of them further
        on.
        """
        if self.shuffle or not self.random:
            return 0
        *_, round, _, step, _ = key
        return (int(round) + int(step) - 2) * self.count(examples) % self.batches_an_epoch(examples)

    def examples(self, examples: int) -> int:
        """Read in one exchange by a client with so many, each time counted."""
        return sum(self.sizes(examples))


def draw(reads: Reads, examples: int, key: Key) -> list[Indices]:
    """The positions of each mini-batch, in reading order.

    The key ends in (..., round, phase, step, client).
    """
    line, sizes = line_up(reads, examples, key)
    return [line[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def line_up(reads: Reads, examples: int, key: Key) -> tuple[Indices, list[int]]:
    """The positions in reading order, and how many of them each mini-batch takes.

    A batch that takes in everything is read in stored order: nothing random is left in it, not even
    the order of a sum.
    """
    if reads.aside:
        aside = spared(reads, examples, key)
        return aside, [len(aside)]
    free = (
        np.setdiff1d(np.arange(examples), spared(reads, examples, key))
        if reads.spare and examples > 1
        else None
    )
    count = examples if free is None else len(free)
    first, each = reads.first(count, key), reads.batches_an_epoch(count)
    sizes, start = reads.sizes(count, first), first * reads.batch_size
    random = (
        generator(("batches", *key))
        if reads.random and reads.shuffle and count > reads.batch_size
        else None
    )
    epochs = [
        (np.arange(count) if random is None else random.permutation(count))[
            : each * reads.batch_size
        ]
        for _ in range(0, first + len(sizes), each)
    ]
    line = (epochs[0] if len(epochs) == 1 else np.concatenate(epochs))[start : start + sum(sizes)]
    return line if free is None else free[line], sizes


def spared(reads: Reads, examples: int, key: Key) -> Indices:
    """The positions set aside, in stored order: the same at every step of a round, and at most half
    of all there are.

    An only example is read and set aside at once.
    """
    *path, _, client = key
    count = max(min(reads.spare, examples // 2), 1)
    return np.sort(generator(("spare", *path, client)).permutation(examples)[:count])
