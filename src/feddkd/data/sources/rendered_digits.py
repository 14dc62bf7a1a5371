"""Digits drawn from fonts, similar to SynthDigits.

SynthDigits: Ganin and Lempitsky, ICML 2015, arXiv:1409.7495. The digits here are generated and are
not SynthDigits; the name `generated` always says so. They vary as in SynthDigits: font, size,
rotation, position, neighbouring digits, colours of stroke and background, blur. The fonts are
matplotlib's.
"""

import functools
import math
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from feddkd.data.examples import Data, from_arrays
from feddkd.data.sources.registry import DIGITS, SOURCES, Source
from feddkd.randomness import Key, generator
from feddkd.spec.types import Bound, Whole

ImageCount = Annotated[int, Bound(least=1, most=1_000_000)]  # a larger number is a mistake
FONTS = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    *("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique"),
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic"),
    *("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta"),
    *("cmr10", "cmb10", "cmss10", "cmtt10", "cmti10"),
)
SIDE = 32
FINE = 2 * SIDE  # strokes are drawn at twice the size, then averaged, for smooth edges
GLYPH_HEIGHT = 40  # of a canvas of FINE pixels
CHUNK = 256  # images drawn at once; it is part of the key: another number gives other images
GREY = torch.tensor([0.299, 0.587, 0.114])


@SOURCES.register
def generated_digits(train: ImageCount = 7438, test: ImageCount = 4000, seed: Whole = 0) -> Source:
    """A substitute for SynthDigits, drawn here from fonts."""

    def load(root: Path | None) -> Data:
        return from_arrays(
            render(train, ("generated digits", seed, "train")),
            render(test, ("generated digits", seed, "test")),
            name="generated_digits",
            labels=DIGITS,
            note="generated from fonts, not SynthDigits",
        )

    origin, transform = "generated from matplotlib's fonts", "normalise(mean=0.5, std=0.5)"
    summary = "digits 0-9 generated from fonts, 32x32 colour; not SynthDigits"
    return Source(load, (), origin, transform, summary)


def render(count: int, key: Key) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return images (N, 3, 32, 32) and labels, as a pure function of the key.

    On another machine a pixel may differ by one grey level, from rounding.
    """
    parts = [_draw(min(CHUNK, count - start), (*key, start)) for start in range(0, count, CHUNK)]
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def _draw(count: int, key: Key) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    draws = _Draws(key, count)
    shapes, widths = _glyphs()
    font, text = draws.whole(len(FONTS), 1), draws.whole(10, 3)
    image = _paint(draws, *_strokes(draws, shapes[font, text], widths[font, text]))
    image = _soften(draws, image) + draws.between(0, 0.04, 1, 1, 1) * draws.normal(3, SIDE, SIDE)
    return (image.clamp(0, 1) * 255).round().to(torch.uint8).numpy(), text[:, 1].numpy()


class _Draws:
    """Random numbers for all images of a chunk; the first axis is always the image."""

    def __init__(self, key: Key, count: int) -> None:
        self._rng, self._count = generator(key), count

    def between(self, low: float, high: float, *shape: int) -> Tensor:
        return torch.from_numpy(
            self._rng.uniform(low, high, (self._count, *shape)).astype(np.float32)
        )

    def normal(self, *shape: int) -> Tensor:
        return torch.from_numpy(self._rng.standard_normal((self._count, *shape), np.float32))

    def whole(self, below: int, *shape: int) -> Tensor:
        return torch.from_numpy(self._rng.integers(0, below, (self._count, *shape)))

    def chance(self, share: float, *shape: int) -> Tensor:
        return (self.between(0, 1, *shape) < share).float()


@functools.cache
def _glyphs() -> tuple[Tensor, Tensor]:
    """Return each digit of each font as a mask (fonts, 10, FINE, FINE), and its width.

    The unit of the widths is half the width of the mask.
    """
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    masks = np.zeros((len(FONTS), 10, FINE, FINE), np.float32)
    widths = np.zeros((len(FONTS), 10), np.float32)
    for i, name in enumerate(FONTS):
        path = Path(matplotlib.get_data_path(), "fonts", "ttf", f"{name}.ttf")
        font = ImageFont.truetype(str(path), 100, layout_engine=ImageFont.Layout.BASIC)
        _, top, _, bottom = font.getbbox("0")
        font = font.font_variant(size=round(100 * GLYPH_HEIGHT / (bottom - top)))
        for digit in range(10):
            canvas = Image.new("L", (FINE, FINE))
            left, top, right, bottom = font.getbbox(str(digit))
            corner = (FINE - left - right) / 2, (FINE - top - bottom) / 2
            ImageDraw.Draw(canvas).text(corner, str(digit), 255, font)
            masks[i, digit] = np.asarray(canvas) / 255
            widths[i, digit] = 2 * (right - left) / FINE
    return torch.from_numpy(masks), torch.from_numpy(widths)


def _strokes(draws: _Draws, shapes: Tensor, widths: Tensor) -> tuple[Tensor, Tensor]:
    """Return masks (N, 1, SIDE, SIDE) of the digit with its neighbours, and of their outline.

    The outline is the same strokes, made thicker.
    """
    grid = _placement(draws)
    gap = draws.between(0.05, 0.25)
    mask = _sample(shapes[:, 1], grid)
    for side, sign in ((0, -1), (2, 1)):
        shift = torch.zeros(len(gap), 1, 1, 2)
        shift[:, 0, 0, 0] = sign * ((widths[:, 1] + widths[:, side]) / 2 + gap)
        neighbour = _sample(shapes[:, side], grid - shift) * draws.chance(0.4, 1, 1, 1)
        mask = torch.maximum(mask, neighbour)
    mask = F.avg_pool2d(mask, 2)
    return mask, F.max_pool2d(mask, 3, 1, 1) * draws.chance(0.3, 1, 1, 1)


def _sample(shapes: Tensor, grid: Tensor) -> Tensor:
    return F.grid_sample(shapes[:, None], grid, align_corners=False)


def _placement(draws: _Draws) -> Tensor:
    """Return for each pixel of the image the point of the glyph's mask that it shows.

    The glyph is moved, rotated, slanted, stretched and scaled.
    """
    angle, slant = draws.between(-0.4, 0.4), draws.between(-0.2, 0.2)
    scale = draws.between(15, 27) / SIDE * FINE / GLYPH_HEIGHT
    stretch = draws.between(0.8, 1.15) * scale
    turn = torch.stack([angle.cos(), angle.sin(), -angle.sin(), angle.cos()], -1).view(-1, 2, 2)
    lean = torch.stack([1 / stretch, slant / scale, torch.zeros_like(scale), 1 / scale], -1)
    lean = lean.view(-1, 2, 2)
    ticks = (torch.arange(FINE) + 0.5) / SIDE - 1
    points = torch.stack(torch.meshgrid(ticks, ticks, indexing="xy"), -1).view(1, -1, 2)
    return ((points - draws.between(-0.12, 0.12, 1, 2)) @ (lean @ turn).mT).view(-1, FINE, FINE, 2)


def _paint(draws: _Draws, digits: Tensor, outline: Tensor) -> Tensor:
    """Return the images: background, then outline, then digits in a contrasting colour."""
    base = draws.between(0.05, 0.95, 3)
    image = base[..., None, None] + _texture(draws)
    image = torch.lerp(image, draws.between(0, 1, 3, 1, 1), outline)
    return torch.lerp(image, _contrasting(draws, base)[..., None, None], digits)


def _contrasting(draws: _Draws, base: Tensor) -> Tensor:
    """Return the first of twelve random colours that is clearly lighter or darker than the base.

    If none is, return the colour with the most contrast.
    """
    colours = draws.between(0, 1, 12, 3)
    contrast = ((colours - base[:, None]) @ GREY).abs()
    clear = (contrast > 0.3).float()
    chosen = torch.where(clear.any(1), clear.argmax(1), contrast.argmax(1))
    return colours[torch.arange(len(chosen)), chosen]


def _texture(draws: _Draws) -> Tensor:
    """Return a smooth gradient with stripes and blobs of random strength, in three channels."""
    ticks = torch.linspace(-1, 1, SIDE)
    angle = draws.between(0, 2 * math.pi, 2, 1, 1)
    along = angle.cos() * ticks + angle.sin() * ticks[:, None]
    gradient = along[:, :1] * draws.between(-0.25, 0.25, 3, 1, 1)
    waves = along[:, 1:] * draws.between(3, 16, 1, 1, 1) + draws.between(0, 6, 1, 1, 1)
    stripes = torch.sin(waves) * draws.between(-0.15, 0.15, 3, 1, 1)
    noise = draws.normal(3, 6, 6)
    blobs = F.interpolate(noise, SIDE, mode="bicubic", align_corners=False)
    blobs = blobs * draws.between(0, 0.16, 1, 1, 1)
    return gradient + stripes * draws.chance(0.5, 1, 1, 1) + blobs


def _soften(draws: _Draws, image: Tensor) -> Tensor:
    """Return the images blurred, from not at all to clearly out of focus."""
    kernel = torch.tensor([1.0, 4.0, 6.0, 4.0, 1.0]) / 16
    weight = (kernel[:, None] * kernel).expand(3, 1, 5, 5)
    blurred = F.conv2d(F.pad(image, (2, 2, 2, 2), mode="replicate"), weight, groups=3)
    return torch.lerp(image, blurred, draws.between(0, 1, 1, 1, 1))
