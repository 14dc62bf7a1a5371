"""The network of FedBN's digits experiment.

Three 5x5 convolutions and three full layers, with batch norm after each but the last. 14,219,210
parameters for 10 classes on 3x28x28 input, 5,632 of them batch norm's.
"""

from torch import nn


def digit_cnn(channels: int, classes: int) -> nn.Module:
    def conv(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 5, padding=2), nn.BatchNorm2d(b), nn.ReLU()]

    def full(a: int, b: int) -> list[nn.Module]:
        return [nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()]

    return nn.Sequential(
        *conv(channels, 64),
        nn.MaxPool2d(2),
        *conv(64, 64),
        nn.MaxPool2d(2),
        *conv(64, 128),
        nn.Flatten(),
        *full(6272, 2048),
        *full(2048, 512),
        nn.Linear(512, classes),
    )
