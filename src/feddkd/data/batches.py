"""Mini-batches: the examples that a client reads and their order, as a pure function of a key."""

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import numpy as np
import numpy.typing as npt

from feddkd.randomness import Key, generator

Indices = npt.NDArray[np.int64]
# public: examples that the server holds and that every client may read.
# pooled: the training examples of all clients together, for a baseline.
# none: no real examples; a step then reads one example, which has no meaning.
Source = Literal["train", "validation", "test", "public", "train+public", "pooled", "none"]


@dataclass(frozen=True)
class Reads:
    """A rule that says which mini-batches a client reads in one exchange."""

    batch_size: int
    epochs: int = 1
    # instead of epochs: this number of mini-batches, from as many epochs as they need
    steps: int | None = None
    source: Source = "train"
    # True: shuffled, and augmented if the transform has random steps. False: in stored order and
    # without augmentation, as in testing
    random: bool = True
    # False: augmented but in stored order; each round continues where the round before it ended
    shuffle: bool = True
    drop_last: bool = False  # leave out an epoch's partial batch, unless it is the only one
    spare: int = 0  # number of examples that are set aside and not read, drawn in every round
    aside: bool = False  # read the examples that are set aside, in one batch, and no others
    # the same examples are set aside in all rounds and phases
    lasting: bool = False

    def free(self, examples: int) -> int:
        """Return how many of a client's examples are not set aside for good."""
        lasts = self.lasting and not self.aside and examples > 1
        return examples - self.kept(examples) if lasts else examples

    def kept(self, examples: int) -> int:
        """Return how many of a client's examples are set aside: at most half of them."""
        return max(min(self.spare, examples // 2), 1)

    def batches_an_epoch(self, examples: int) -> int:
        examples = self.free(examples)
        whole = examples // self.batch_size
        return max(whole, 1) if self.drop_last else math.ceil(examples / self.batch_size)

    def count(self, examples: int) -> int:
        """Return the number of mini-batches that a client with this number of examples reads."""
        return self.epochs * self.batches_an_epoch(examples) if self.steps is None else self.steps

    def sizes(self, examples: int, first: int = 0) -> list[int]:
        """Return the sizes of these mini-batches, from the epoch's mini-batch `first` on.

        All are full, except the last of an epoch.
        """
        each, end = self.batches_an_epoch(examples), first + self.count(examples)
        last = min(self.batch_size, self.free(examples) - (each - 1) * self.batch_size)
        epoch = [*[self.batch_size] * (each - 1), last]
        return (epoch * -(-end // each))[first:end]

    def first(self, examples: int, key: Key) -> int:
        """Return the mini-batch of an epoch with which an exchange begins.

        It is counted as if the client had taken part in every round. Where a round has several
        exchanges, as in DKD, the next round begins one of them further on.
        """
        if self.shuffle or not self.random:
            return 0
        *_, round, _, step, _ = key
        return (int(round) + int(step) - 2) * self.count(examples) % self.batches_an_epoch(examples)

    def examples(self, examples: int) -> int:
        """Return the number of examples read in one exchange, counting each time one is read."""
        return sum(self.sizes(examples))


def draw(reads: Reads, examples: int, key: Key) -> list[Indices]:
    """Return the positions of each mini-batch, in reading order.

    The key ends in (..., round, phase, step, client).
    """
    line, sizes = line_up(reads, examples, key)
    return [line[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def line_up(reads: Reads, examples: int, key: Key) -> tuple[Indices, list[int]]:
    """Return the positions in reading order, and the size of each mini-batch.

    A batch that contains all examples is read in stored order: then nothing random is left in it,
    not even the order of a sum.
    """
    if reads.aside:
        aside = spared(reads, examples, key)
        return aside, [len(aside)]
    free = None
    if reads.spare and examples > 1:
        free = np.setdiff1d(np.arange(examples), spared(reads, examples, key))
    count = examples if free is None else len(free)
    known = examples if reads.lasting else count
    first, each = reads.first(known, key), reads.batches_an_epoch(known)
    sizes, start = reads.sizes(known, first), first * reads.batch_size
    random = None
    if reads.random and reads.shuffle and count > reads.batch_size:
        random = generator(("batches", *key))
    epochs = []
    for _ in range(0, first + len(sizes), each):
        order = np.arange(count) if random is None else random.permutation(count)
        epochs.append(order[: each * reads.batch_size])
    line = (epochs[0] if len(epochs) == 1 else np.concatenate(epochs))[start : start + sum(sizes)]
    return line if free is None else free[line], sizes


def spared(reads: Reads, examples: int, key: Key) -> Indices:
    """Return the positions set aside, in stored order: the same at every step of a round.

    At most half of the examples are set aside. A client's only example is both read and set aside.
    """
    *path, _, client = key
    if reads.lasting:
        path = path[:-2]  # without round and phase
    line = generator(("spare", *path, client)).permutation(examples)
    return np.sort(line[: reads.kept(examples)])
