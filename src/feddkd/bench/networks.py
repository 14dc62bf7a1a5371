"""Everyday networks for the benchmark, of any width: as people write them, without tricks."""

# mypy: disable-error-code="no-any-return"

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import relu, scaled_dot_product_attention

Norm = Callable[[int], nn.Module]


def group_norm(channels: int) -> nn.Module:
    """Return a group norm with two channels in a group, or one group of a single channel."""
    return nn.GroupNorm(max(channels // 2, 1), channels)


class ResidualBlock(nn.Module):
    """ResNet's basic block."""

    def __init__(self, channels: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = norm(width), norm(width)
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or channels != width:
            convolution = nn.Conv2d(channels, width, 1, stride, bias=False)
            self.skip = nn.Sequential(convolution, norm(width))

    def forward(self, x: Tensor) -> Tensor:
        inner = relu(self.norm1(self.conv1(x)))
        return relu(self.norm2(self.conv2(inner)) + self.skip(x))


def resnet18(norm: Norm, width: int = 64) -> nn.Module:
    """Return ResNet-18 for 32x32 images: a first layer of 3x3 and no pooling after it."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), norm(width), nn.ReLU()]
    channels = width
    for stage in range(4):
        for stride in (1 if stage == 0 else 2, 1):
            layers.append(ResidualBlock(channels, width << stage, stride, norm))
            channels = width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


class SelfAttention(nn.Module):
    """Attention of several heads, with an adapter of low rank if `rank` is given."""

    def __init__(self, width: int, heads: int, causal: bool, rank: int) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.down = self.up = None
        if rank:
            self.down = nn.Linear(width, rank, bias=False)
            self.up = nn.Linear(rank, 3 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        if self.down is not None and self.up is not None:
            qkv = qkv + self.up(self.down(x))
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1)
        )
        seen = scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(seen.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Attention and a perceptron, each after a layer norm."""

    def __init__(self, width: int, heads: int, causal: bool = False, rank: int = 0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, causal, rank)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm2(x))))


class VisionTransformer(nn.Module):
    """A vision transformer for 32x32 images in patches of 4x4.

    With a rank only the adapters of that rank and the head are trained.
    """

    def __init__(self, width: int, depth: int, heads: int, rank: int = 0) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.place = nn.Parameter(torch.randn(1, 64, width) * 0.02)
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, heads, rank=rank) for _ in range(depth))
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)
        for name, parameter in self.named_parameters() if rank else ():
            parameter.requires_grad = any(part in name for part in ("down", "up", "head"))

    def forward(self, x: Tensor) -> Tensor:
        seen = self.patches(x).flatten(2).transpose(1, 2) + self.place
        return self.head(self.norm(self.blocks(seen)).mean(1))


class CharacterModel(nn.Module):
    """A decoder that predicts the next character."""

    def __init__(self, width: int, depth: int, heads: int, characters: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, width)
        self.place = nn.Parameter(torch.randn(1, length, width) * 0.02)
        blocks = (TransformerBlock(width, heads, causal=True) for _ in range(depth))
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(x) + self.place[:, : x.shape[1]])))


class RecurrentModel(nn.Module):
    """LEAF's network for Shakespeare: an LSTM of two layers predicts the next character."""

    def __init__(self, width: int, characters: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, 8)
        self.cells = nn.LSTM(8, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, characters)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(self.embed(x))[0])


class UNet(nn.Module):
    """A U-Net of three levels with group norm, two classes for each pixel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.ModuleList([_pair(3, width), _pair(width, 2 * width)])
        self.middle = _pair(2 * width, 4 * width)
        wide = 4 * width, 2 * width
        self.grow = nn.ModuleList(nn.ConvTranspose2d(size, size // 2, 2, 2) for size in wide)
        self.up = nn.ModuleList(_pair(size, size // 2) for size in wide)
        self.out = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down[0](x)
        second = self.down[1](nn.functional.max_pool2d(first, 2))
        inner = self.middle(nn.functional.max_pool2d(second, 2))
        inner = self.up[0](torch.cat([self.grow[0](inner), second], 1))
        return self.out(self.up[1](torch.cat([self.grow[1](inner), first], 1)))


def _pair(channels: int, width: int) -> nn.Sequential:
    """Return two convolutions, each with group norm and ReLU."""
    layers: list[nn.Module] = []
    for size in (channels, width):
        layers += [nn.Conv2d(size, width, 3, 1, 1), group_norm(width), nn.ReLU()]
    return nn.Sequential(*layers)
