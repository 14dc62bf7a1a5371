"""A plain multi-layer perceptron with ReLU, for small data and quick tests."""

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def mlp(shape: Sequence[int], classes: int, hidden: Sequence[int]) -> nn.Module:
    widths = (math.prod(shape), *hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))
