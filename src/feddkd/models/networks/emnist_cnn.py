"""FedGen's EMNIST network.

Two strided 3x3 convolutions with batch norm, then full layers 784-32-classes without an activation
between them. 26,962 parameters for 26 classes on 1x28x28 input. (FedGen ends in log-softmax;
cross-entropy of the logits is the same loss.)
"""

from torch import nn


def emnist_cnn(channels: int, classes: int) -> nn.Module:
    def conv(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.ReLU()]

    return nn.Sequential(
        *conv(channels, 6), *conv(6, 16), nn.Flatten(), nn.Linear(784, 32), nn.Linear(32, classes)
    )
