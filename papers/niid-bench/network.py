"""The networks of Flower's baseline niid_bench: two 5x5 convolutions with 6 and 16 channels, full
layers of 120 and 84.
"""

from torch import nn


def cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the network for square images."""
    side = ((shape[1] - 4) // 2 - 4) // 2
    return nn.Sequential(
        *(nn.Conv2d(shape[0], 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(16 * side * side, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()),
        nn.Linear(84, classes),
    )
