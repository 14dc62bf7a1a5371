"""Segmentation: which pixels are a disc, which a square? With a small U-Net."""

import numpy as np
import torch
from torch import Tensor, nn

from feddkd.extend import Data, from_arrays

UNCLEAR = 255  # the edge of a shape has no class


def shapes(count: int = 240, side: int = 16) -> Data:
    """Return noisy grey pictures with a disc and a square each, and the class of each pixel."""
    random = np.random.default_rng(0)
    rows, columns = np.mgrid[:side, :side]

    def one() -> tuple[np.ndarray, np.ndarray]:
        classes = np.zeros((side, side), np.int64)
        for shape in (1, 2):
            row, column, size = (*random.uniform(2, side - 2, 2), random.uniform(2, side / 4))
            far = (np.hypot, np.maximum)[shape - 1](abs(rows - row), abs(columns - column))
            classes[far < size + 0.7] = UNCLEAR
            classes[far < size] = shape
        lights = np.choose(np.minimum(classes, 3), random.permutation([-1, 0, 1, 0]))
        return (lights + 0.5 * random.standard_normal((side, side)))[None], classes

    def several(count: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = zip(*(one() for _ in range(count)), strict=True)
        return np.stack(x).astype(np.float32), np.stack(y)

    return from_arrays(
        several(count), several(100), class_labels=False, labels=["ground", "disc", "square"]
    )


class UNet(nn.Module):
    """A U-Net with one step down and up."""

    def __init__(self, classes: int, width: int = 8) -> None:
        super().__init__()
        self.down = self.block(1, width)
        self.bottom = self.block(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.out = nn.Sequential(self.block(2 * width, width), nn.Conv2d(width, classes, 1))

    @staticmethod
    def block(before: int, after: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(2, after), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down(x)
        coarse = self.up(self.bottom(nn.functional.max_pool2d(fine, 2)))
        logits: Tensor = self.out(torch.cat([fine, coarse], 1))
        return logits


def unet() -> nn.Module:
    """Return the network."""
    return UNet(classes=3)
