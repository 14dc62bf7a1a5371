"""ResNet-18 with group norm for 32x32 images, as in FL-Simulator: torchvision's ResNet-18 (7x7
stem of stride 2, max-pooling) with 2 groups in place of batch norm. 11,181,642 parameters.
"""

from torch import Tensor, nn

GROUPS = 2


class Block(nn.Module):
    """Two 3x3 convolutions and a way around them."""

    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = conv(a, b, 3, stride), nn.GroupNorm(GROUPS, b)
        self.conv2, self.norm2 = conv(b, b, 3, 1), nn.GroupNorm(GROUPS, b)
        same = stride == 1 and a == b
        around = [] if same else [conv(a, b, 1, stride), nn.GroupNorm(GROUPS, b)]
        self.around = nn.Sequential(*around)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (y + self.around(x)).relu()


def conv(a: int, b: int, size: int, stride: int) -> nn.Conv2d:
    """Return a convolution without bias, initialised as in torchvision."""
    layer = nn.Conv2d(a, b, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


def resnet18(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the network."""
    widths = ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2))
    blocks = [block for a, b, s in widths for block in (Block(a, b, s), Block(b, b, 1))]
    stem = [conv(shape[0], 64, 7, 2), nn.GroupNorm(GROUPS, 64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes)]
    return nn.Sequential(*stem, *blocks, *end)
