"""Feature skew and label noise: the changes of clients' examples."""

from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from feddkd.data.partitions.changes import CHANGES, Change, Place
from feddkd.errors import InputError
from feddkd.randomness import generator
from feddkd.spec.types import Count, Positive, Share

Spread = Literal["linear", "equal"]


@CHANGES.register
def noise(std: Positive = 0.1, spread: Spread = "linear") -> Change:
    """Add Gaussian noise to the examples.

    linear: client k of K, counted from 1, has noise of std * k / K (Li et al., ICDE 2022,
        arXiv:2102.02079).
    equal: all clients have noise of std.

    The unit of std is the network's: the largest value of a pixel is 1.
    """

    def examples(x: Tensor, place: Place) -> Tensor:
        _need_numbers("noise", x)
        random = generator((*place.key, "noise", place.part))
        level = std * _level(spread, place) * place.scale
        return _stored(x.double() + level * torch.from_numpy(random.standard_normal(x.shape)), x)

    return Change(lambda place: f"noise {std * _level(spread, place):.3g}", examples)


@CHANGES.register
def rotation(degrees: Positive = 90.0, groups: Count = 4) -> Change:
    """Turn the images of client k by (k mod groups) * degrees.

    With its defaults it is the rotated MNIST of Ghosh et al., NeurIPS 2020, arXiv:2006.04088. Other
    angles than multiples of 90 are interpolated, with zeros where an image has no pixel.
    """

    def angle(place: Place) -> float:
        return place.client % groups * degrees % 360

    def examples(x: Tensor, place: Place) -> Tensor:
        _need_images("rotation", x)
        turned = angle(place)
        if turned % 90 == 0 and x.shape[2] == x.shape[3]:
            return x.rot90(int(turned // 90), (2, 3))
        return _stored(_rotated(x.double(), turned), x)

    return Change(lambda place: f"rotation {angle(place):g}", examples)


@CHANGES.register
def colour(strength: Share = 0.5) -> Change:
    """Multiply each channel of a client's images by its own factor in [1 - strength, 1 + strength].

    For grey images, which have one channel, it changes the brightness.
    """

    def factors(place: Place, channels: int) -> np.ndarray:
        drawn = generator((*place.key, "colour")).uniform(-strength, strength, channels)
        return np.asarray(1 + drawn)

    def examples(x: Tensor, place: Place) -> Tensor:
        _need_images("colour", x)
        scaled = x.double() * torch.from_numpy(factors(place, x.shape[1]))[:, None, None]
        return _stored(scaled, x)

    def describe(place: Place) -> str:
        return f"colour {' '.join(f'{factor:.2f}' for factor in factors(place, place.channels))}"

    return Change(describe, examples)


@CHANGES.register
def label_noise(share: Share = 0.2, spread: Spread = "equal") -> Change:
    """Give a share of each client's training examples the label of another class, drawn uniformly.

    equal: every client has this share of wrong labels.
    linear: client k of K, counted from 1, has share * k / K.

    Labels of test and validation examples stay right.
    """

    def labels(y: Tensor, place: Place) -> Tensor:
        if place.classes < 2 or y.ndim != 1:
            raise InputError("partition: label_noise() needs data with two or more classes")
        random = generator((*place.key, "labels"))
        count = round(share * _level(spread, place) * len(y))
        wrong = torch.from_numpy(random.choice(len(y), count, replace=False))
        shift = torch.from_numpy(random.integers(1, place.classes, count))
        changed = y.clone()
        changed[wrong] = (y[wrong] + shift) % place.classes
        return changed

    def describe(place: Place) -> str:
        return f"wrong labels {share * _level(spread, place):.3g}"

    return Change(describe, labels=labels)


def _level(spread: Spread, place: Place) -> float:
    return (place.client + 1) / place.clients if spread == "linear" else 1.0


def _stored(changed: Tensor, like: Tensor) -> Tensor:
    """Return changed examples in the stored type; pixels are whole numbers from 0 to 255."""
    if like.dtype == torch.uint8:
        changed = changed.round().clamp(0, 255)
    return changed.to(like.dtype)


def _rotated(x: Tensor, degrees: float) -> Tensor:
    """Return images turned counter-clockwise about their centre."""
    height, width = x.shape[2:]
    cos, sin = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
    # the grid has coordinates from -1 to 1 in both directions, whatever the sides of the image
    turn = torch.tensor([[[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]]])
    grid = affine_grid(turn.to(x.dtype).expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return grid_sample(x, grid, align_corners=False)


def _need_numbers(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor) or not (x.dtype == torch.uint8 or x.is_floating_point()):
        raise InputError(
            f"partition: {name}() changes pixels and real numbers; these examples are tokens or"
            " have several parts"
        )


def _need_images(name: str, x: Tensor) -> None:
    _need_numbers(name, x)
    if x.ndim != 4:
        raise InputError(
            f"partition: {name}() changes images of channels x height x width; these examples have"
            f" the shape {tuple(x.shape[1:])}"
        )
