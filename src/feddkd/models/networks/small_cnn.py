"""The small CNN of pfl-research's CIFAR-10 benchmark (arXiv:2404.06430).

Two unpadded 3x3 convolutions, one pooling, 128 hidden units, dropout. 1,626,442 parameters for 10
classes on 3x32x32 input. (pfl draws the weights by Glorot's rule; here each layer draws them by
PyTorch's rule for it.)
"""

from torch import nn


def small_cnn(channels: int, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(12544, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, classes),
    )
