"""Digits drawn from fonts, in the manner of SynthDigits (Ganin and Lempitsky, ICML 2015,
arXiv:1409.7495).

They are generated here and are not SynthDigits; wherever they are shown they are called generated.
What varies is what varied there: font, size, rotation, place, neighbouring digits, colours of
stroke and background, blur. The fonts are matplotlib's.
"""

import functools
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from feddkd.randomness import Key, generator

FONTS = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    *("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique"),
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic"),
    *("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta"),
    *("cmr10", "cmb10", "cmss10", "cmtt10", "cmti10"),
)
SIDE = 32
FINE = 2 * SIDE  # strokes are drawn at twice the size, then averaged: smooth edges
GLYPH_HEIGHT = 40  # of a canvas of FINE pixels
CHUNK = 256  # images drawn at once, and part of the key: another number gives other images
GREY = torch.tensor([0.299, 0.587, 0.114])


def render(count: int, key: Key) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images (N, 3, 32, 32) and labels; a pure function of the key.

    Another machine may round a pixel by one grey level.
    """
    parts = [_draw(min(CHUNK, count - start), (*key, start)) for start in range(0, count, CHUNK)]
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def _draw(count: int, key: Key) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    rng = _Dice(key, count)
    shapes, widths = _glyphs()
    font, text = rng.whole(len(FONTS), 1), rng.whole(10, 3)
    image = _paint(rng, *_strokes(rng, shapes[font, text], widths[font, text]))
    image = _soften(rng, image) + rng.between(0, 0.04, 1, 1, 1) * rng.normal(3, SIDE, SIDE)
    return (image.clamp(0, 1) * 255).round().to(torch.uint8).numpy(), text[:, 1].numpy()


class _Dice:
    """Draws for a whole chunk at once; the first axis is always the image."""

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
    """Every digit of every font as a mask (fonts, 10, FINE, FINE), and its width where the canvas
    is 2 wide.
    """
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    masks, widths = (
        np.zeros((len(FONTS), 10, FINE, FINE), np.float32),
        np.zeros((len(FONTS), 10), np.float32),
    )
    for i, name in enumerate(FONTS):
        path = Path(matplotlib.get_data_path(), "fonts", "ttf", f"{name}.ttf")
        font = ImageFont.truetype(str(path), 100, layout_engine=ImageFont.Layout.BASIC)
        _, top, _, bottom = font.getbbox("0")
        font = font.font_variant(size=round(100 * GLYPH_HEIGHT / (bottom - top)))
        for digit in range(10):
            canvas = Image.new("L", (FINE, FINE))
            left, top, right, bottom = font.getbbox(str(digit))
            ImageDraw.Draw(canvas).text(
                ((FINE - left - right) / 2, (FINE - top - bottom) / 2), str(digit), 255, font
            )
            masks[i, digit], widths[i, digit] = np.asarray(canvas) / 255, 2 * (right - left) / FINE
    return torch.from_numpy(masks), torch.from_numpy(widths)


def _strokes(rng: _Dice, shapes: Tensor, widths: Tensor) -> tuple[Tensor, Tensor]:
    """Masks (N, 1, SIDE, SIDE) of the digit with its neighbours, and of the same made thicker: the
    outline.
    """
    grid = _placement(rng)
    gap = rng.between(0.05, 0.25)
    mask = _sample(shapes[:, 1], grid)
    for side, sign in ((0, -1), (2, 1)):
        shift = torch.zeros(len(gap), 1, 1, 2)
        shift[:, 0, 0, 0] = sign * ((widths[:, 1] + widths[:, side]) / 2 + gap)
        mask = torch.maximum(
            mask, _sample(shapes[:, side], grid - shift) * rng.chance(0.4, 1, 1, 1)
        )
    mask = F.avg_pool2d(mask, 2)
    return mask, F.max_pool2d(mask, 3, 1, 1) * rng.chance(0.3, 1, 1, 1)


def _sample(shapes: Tensor, grid: Tensor) -> Tensor:
    return F.grid_sample(shapes[:, None], grid, align_corners=False)


def _placement(rng: _Dice) -> Tensor:
    """For each pixel of the image, the point of the glyph's canvas that it shows: moved, turned,
    slanted, stretched, scaled.
    """
    angle, slant = rng.between(-0.4, 0.4), rng.between(-0.2, 0.2)
    scale = rng.between(15, 27) / SIDE * FINE / GLYPH_HEIGHT
    stretch = rng.between(0.8, 1.15) * scale
    turn = torch.stack([angle.cos(), angle.sin(), -angle.sin(), angle.cos()], -1).view(-1, 2, 2)
    lean = torch.stack([1 / stretch, slant / scale, torch.zeros_like(scale), 1 / scale], -1).view(
        -1, 2, 2
    )
    ticks = (torch.arange(FINE) + 0.5) / SIDE - 1
    points = torch.stack(torch.meshgrid(ticks, ticks, indexing="xy"), -1).view(1, -1, 2)
    return ((points - rng.between(-0.12, 0.12, 1, 2)) @ (lean @ turn).mT).view(-1, FINE, FINE, 2)


def _paint(rng: _Dice, digits: Tensor, outline: Tensor) -> Tensor:
    """Background, then the outline, then the digits in a colour that can be told from the
    background's.
    """
    base = rng.between(0.05, 0.95, 3)
    image = base[..., None, None] + _texture(rng)
    image = torch.lerp(image, rng.between(0, 1, 3, 1, 1), outline)
    return torch.lerp(image, _contrasting(rng, base)[..., None, None], digits)


def _contrasting(rng: _Dice, base: Tensor) -> Tensor:
    """The first of a few random colours that is clearly lighter or darker than the base; the
    clearest if none is.
    """
    colours = rng.between(0, 1, 12, 3)
    contrast = ((colours - base[:, None]) @ GREY).abs()
    clear = (contrast > 0.3).float()
    chosen = torch.where(clear.any(1), clear.argmax(1), contrast.argmax(1))
    return colours[torch.arange(len(chosen)), chosen]


def _texture(rng: _Dice) -> Tensor:
    """A smooth gradient, stripes and blobs, each as strong as chance has it, in three channels."""
    ticks = torch.linspace(-1, 1, SIDE)
    angle = rng.between(0, 2 * math.pi, 2, 1, 1)
    along = angle.cos() * ticks + angle.sin() * ticks[:, None]
    gradient = along[:, :1] * rng.between(-0.25, 0.25, 3, 1, 1)
    stripes = torch.sin(
        along[:, 1:] * rng.between(3, 16, 1, 1, 1) + rng.between(0, 6, 1, 1, 1)
    ) * rng.between(-0.15, 0.15, 3, 1, 1)
    blobs = F.interpolate(
        rng.normal(3, 6, 6), SIDE, mode="bicubic", align_corners=False
    ) * rng.between(0, 0.16, 1, 1, 1)
    return gradient + stripes * rng.chance(0.5, 1, 1, 1) + blobs


def _soften(rng: _Dice, image: Tensor) -> Tensor:
    """Blur, from none to clearly out of focus."""
    kernel = torch.tensor([1.0, 4.0, 6.0, 4.0, 1.0]) / 16
    weight = (kernel[:, None] * kernel).expand(3, 1, 5, 5)
    blurred = F.conv2d(F.pad(image, (2, 2, 2, 2), mode="replicate"), weight, groups=3)
    return torch.lerp(image, blurred, rng.between(0, 1, 1, 1, 1))
