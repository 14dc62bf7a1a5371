"""VGG-9, the CIFAR network of FedMA that the paper uses.

Six padded 3x3 convolutions, three full layers, light dropout, no batch norm.

3,491,530 parameters for 10 classes, 3,537,700 for 100, on 3x32x32 input.
"""

from torch import nn


def vgg9(channels: int, classes: int) -> nn.Module:
    def conv(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, padding=1), nn.ReLU()]

    return nn.Sequential(
        *conv(channels, 32),
        *conv(32, 64),
        nn.MaxPool2d(2),
        *conv(64, 128),
        *conv(128, 128),
        nn.MaxPool2d(2),
        nn.Dropout2d(0.05),
        *conv(128, 256),
        *conv(256, 256),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(4096, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(512, classes),
    )
