"""The random numbers of one forward pass, as functions of the step's key."""

import math
from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from feddkd.errors import InputError
from feddkd.randomness import uniform

# first stream of draws outside dropout layers; the stream of a dropout layer is its number among
# the modules
FREE = 1 << 20
# distance between the streams of a dropout layer's first, second, ... call in one forward pass
AGAIN = 1 << 21
LEAST = 2.0**-25  # half the step of `uniform`: added where a number must not be zero


class KeyedNumbers:
    """The random numbers of one forward pass: each draw takes the next stream of the key."""

    def __init__(self, key: Tensor | None) -> None:
        super().__init__()
        self.key = key
        self.count = 0  # draws outside dropout layers so far
        self.shapes: list[tuple[int, ...]] = []  # of all draws so far
        # the stream of the dropout layer whose module is about to draw
        self.layer: int | None = None
        self._calls: Counter[int] = Counter()

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """Return the next numbers in [0, 1).

        They belong to the stream of the dropout layer that is about to draw, if there is one.
        """
        if self.key is None:
            raise InputError(
                "this network draws random numbers, for dropout for example, so a call needs a key"
            )
        self.shapes.append(tuple(shape))
        layer, self.layer = self.layer, None
        if layer is None:
            stream, self.count = FREE + self.count, self.count + 1
        else:
            stream = layer + AGAIN * self._calls[layer]
            self._calls[layer] += 1
        return uniform(self.key, self.shapes[-1], stream)

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Return numbers of mean 0 and deviation 1, float64, by Box and Muller's formula."""
        radius = (-2 * (self.uniform(shape).double() + LEAST).log()).sqrt()
        return radius * (2 * math.pi * self.uniform(shape).double()).cos()
