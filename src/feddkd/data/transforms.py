"""Transforms of stored pixels into a network's input: scale, pad, crop, flip, normalise.

They take a batch, on the device where the pixels are. Their text is a list of steps joined by `|`:
"pad(pixels=2) | normalise(mean=0.1307, std=0.3081)". Random steps act in training only.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad as torch_pad

from feddkd.errors import InputError
from feddkd.randomness import uniform
from feddkd.spec.registry import Registry, Spelled
from feddkd.spec.types import Count, Positive
from feddkd.trees import Tree, kind_in_words, map_tensors

# (images, key, stream) -> images. The key is None outside training.
StepFn = Callable[[Tensor, Tensor | None, int], Tensor]


@dataclass(frozen=True, eq=False)
class Step(Spelled):
    """One step of a transform."""

    apply: StepFn
    random: bool = False


TRANSFORMS: Registry[Step] = Registry("transform", "feddkd.transforms")


@dataclass(frozen=True, eq=False)
class Transform(Spelled):
    """A function from stored examples to floating-point examples.

    With a key it works as in training, with random crops and flips; without one as in testing.
    Whole numbers other than bytes are tokens, which a network looks up: they stay unchanged. Where
    an example has several tensors, only bytes are scaled, and there can be no steps.
    """

    scale: float
    steps: tuple[Step, ...]

    @property
    def random(self) -> bool:
        return any(step.random for step in self.steps)

    def __call__(self, x: Tree, dtype: torch.dtype, key: Tensor | None = None) -> Tree:
        if not isinstance(x, Tensor):
            return map_tensors(lambda tensor: self._stored(tensor, dtype), x)
        if x.dtype == torch.int64:
            return x
        x = x.to(dtype) / self.scale if self.scale != 1 else x.to(dtype)
        for stream, step in enumerate(self.steps):
            # streams below 1000 belong to the network's dropout layers
            x = step.apply(x, key, 1000 + stream)
        return x

    def _stored(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return one of several tensors of an example as the network sees it."""
        if x.dtype == torch.uint8:
            return x.to(dtype) / self.scale
        return x.to(dtype) if x.is_floating_point() else x

    def check(self, x: Tree) -> None:
        """Raise InputError if the transform has steps and an example is several tensors."""
        if self.steps and not isinstance(x, Tensor):
            raise InputError(
                f"transform {str(self)!r} is for examples of one tensor; these have"
                f" {kind_in_words(x)}: leave the transform out and do its work in the network"
            )


def transform(text: str, scale: float = 1.0) -> Transform:
    """Return the transform that a text describes; the empty text only scales."""
    steps = TRANSFORMS.parse(text) if text.strip() else ()
    return Transform(scale, steps, calls=tuple(call for step in steps for call in step.calls))


@TRANSFORMS.register
def pad(*, pixels: Count = 2) -> Step:
    """Add a border of zeros, before normalising as FedMAX does, so the border becomes -mean/std."""

    def apply(x: Tensor, key: Tensor | None, stream: int) -> Tensor:
        _need_images("pad", x)
        return torch_pad(x, (pixels,) * 4)

    return Step(apply)


@TRANSFORMS.register
def crop(*, padding: Count = 4) -> Step:
    """Reflect-pad, then cut a random window of the old size. Training only."""

    def apply(x: Tensor, key: Tensor | None, stream: int) -> Tensor:
        _need_images("crop", x, padding)
        if key is None:
            return x
        count, channels, height, width = x.shape
        shift = (uniform(key, (count, 2), stream) * (2 * padding + 1)).long()
        rows = shift[:, :1] + torch.arange(height, device=x.device)
        columns = shift[:, 1:] + torch.arange(width, device=x.device)
        padded = torch_pad(x, (padding,) * 4, mode="reflect")
        padded = padded.gather(
            2, rows[:, None, :, None].expand(count, channels, height, padded.shape[3])
        )
        return padded.gather(3, columns[:, None, None, :].expand(count, channels, height, width))

    return Step(apply, random=True)


@TRANSFORMS.register
def flip() -> Step:
    """Mirror left and right with probability one half. Training only."""

    def apply(x: Tensor, key: Tensor | None, stream: int) -> Tensor:
        _need_images("flip", x)
        if key is None:
            return x
        mirrored = uniform(key, (x.shape[0], 1, 1, 1), stream) < 0.5
        return torch.where(mirrored, x.flip(-1), x)

    return Step(apply, random=True)


@TRANSFORMS.register
def version() -> Step:
    """Take one of the versions of an example, which are on its first axis: (N, versions, ...).

    In training it is drawn; in tests it is the first one. See `feddkd.redrawn`.
    """

    def apply(x: Tensor, key: Tensor | None, stream: int) -> Tensor:
        if x.dim() < 3:
            raise InputError(
                "transform 'version' takes examples of shape (N, versions, ...), not"
                f" {tuple(x.shape)}"
            )
        if key is None:
            return x[:, 0]
        chosen = (uniform(key, (x.shape[0],), stream) * x.shape[1]).long()
        return x[torch.arange(x.shape[0], device=x.device), chosen]

    return Step(apply, random=True)


@TRANSFORMS.register
def normalise(*, mean: float | str = 0.5, std: Positive | str = 0.5) -> Step:
    """(x - mean) / std; one number for all channels, or a text such as "0.49,0.48,0.45" with one
    for each.
    """
    means, deviations = _numbers("mean", mean), _numbers("std", std)
    if min(deviations) <= 0:
        raise InputError(f"transform 'normalise': std must be > 0, not {std!r}")

    def apply(x: Tensor, key: Tensor | None, stream: int) -> Tensor:
        return (x - _by_channel(means, x)) / _by_channel(deviations, x)

    return Step(apply)


def _need_images(name: str, x: Tensor, padding: int = 0) -> None:
    if x.dim() != 4 or padding >= min(x.shape[2:]):
        larger = f" with sides above {padding}" if padding else ""
        raise InputError(
            f"transform {name!r} takes images of channels x height x width{larger}, not examples of"
            f" shape {tuple(x.shape[1:])}"
        )


def _numbers(name: str, given: float | str) -> tuple[float, ...]:
    parts = given.split(",") if isinstance(given, str) else [given]
    try:
        numbers = tuple(float(part) for part in parts)
    except ValueError:
        numbers = (math.nan,)
    if not all(map(math.isfinite, numbers)):
        raise InputError(
            f"transform 'normalise': {name} must be a number or numbers joined by commas, not"
            f" {given!r}"
        )
    return numbers


def _by_channel(numbers: tuple[float, ...], like: Tensor) -> Tensor:
    if len(numbers) not in (1, like.shape[1]):
        raise InputError(
            f"transform 'normalise' has numbers for {len(numbers)} channels; the images have"
            f" {like.shape[1]}"
        )
    return _constant(numbers, like.dtype, like.device).reshape(1, -1, *(1,) * (like.dim() - 2))


@functools.cache
def _constant(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the numbers on the device, copied once.

    A copy from the CPU in every call would prevent the recording of a CUDA graph.
    """
    return torch.tensor(numbers, dtype=dtype, device=device)
