"""Networks as users bring them, small: what `functional` must compute as the modules do."""

# mypy: disable-error-code="no-any-return"

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

WORDS, CLASSES = 11, 3


class Case(NamedTuple):
    """A network, and what it reads."""

    build: Callable[[], nn.Module]
    examples: str  # "image", "vector" or "tokens"
    logits: Callable[[Any], Tensor] = lambda found: found
    output: Any = None


def draw(kind: str, number: int, generator: torch.Generator) -> Tensor:
    if kind == "tokens":
        return torch.randint(0, WORDS, (number, 5), generator=generator)
    shape = {"image": (2, 8, 8), "vector": (6,)}[kind]
    return torch.randn(number, *shape, generator=generator, dtype=torch.float64)


class Block(nn.Module):
    """A residual block, with batch or group norm."""

    def __init__(self, a: int, b: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(a, b, 3, stride, 1, bias=False),
            norm(b),
            nn.ReLU(),
            nn.Conv2d(b, b, 3, 1, 1, bias=False),
            norm(b),
        )
        self.skip = (
            nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), norm(b))
            if stride > 1 or a != b
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.skip(x))


def resnet18(norm: Callable[[int], nn.Module]) -> nn.Module:
    """ResNet-18's layers, narrow: eight blocks in four stages."""
    blocks, width = [], 2
    for a, b, stride in ((2, 2, 1), (2, 4, 2), (4, 4, 2), (4, 4, 1)):
        blocks += [Block(a, b, stride, norm), Block(b, b, 1, norm)]
        width = b
    stem = nn.Conv2d(2, 2, 3, 1, 1, bias=False), norm(2), nn.ReLU()
    return nn.Sequential(
        *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)
    )


class Recurrent(nn.Module):
    def __init__(self, cell: Callable[..., nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 4)
        self.cell = cell(4, 3, batch_first=True, **options)
        self.out = nn.Linear(6 if options.get("bidirectional") else 3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cell(self.embed(x))[0][:, -1])


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, 4), nn.Parameter(torch.randn(5, 4) * 0.1)
        layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.2, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(self.embed(x) + self.place).mean(1))


class Decoder(nn.Module):
    """Causal, with a mask and positions that are non-persistent buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 4)
        layer = nn.TransformerDecoderLayer(4, 2, 6, dropout=0.1, batch_first=True)
        self.body, self.out = nn.TransformerDecoder(layer, 1), nn.Linear(4, CLASSES)
        self.register_buffer("mask", torch.full((5, 5), -math.inf).triu(1), persistent=False)
        self.register_buffer("place", torch.sin(torch.arange(20.0)).reshape(5, 4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.embed(x) + self.place
        return self.out(self.body(seen, seen, tgt_mask=self.mask)[:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True)
        self.out = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.stack([x, x.roll(1, 1), x * 0.5], 1)
        return self.out(self.attend(seen, seen, seen, need_weights=False)[0].mean(1))


class Fused(nn.Module):
    """Attention by one function, causal, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = (
            nn.Embedding(WORDS, 4),
            nn.Linear(4, 12),
            nn.Linear(4, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (2, 2)).transpose(1, 2)
            for part in self.qkv(self.embed(x)).chunk(3, -1)
        )
        seen = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=0.3 * self.training, is_causal=True
        )
        return self.out(seen.transpose(1, 2).flatten(2)[:, -1])


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(2, 4, 4, 4)
        self.token, self.place = (
            nn.Parameter(torch.zeros(1, 1, 4)),
            nn.Parameter(torch.randn(1, 5, 4) * 0.02),
        )
        layer = nn.TransformerEncoderLayer(
            4, 2, 8, 0.1, functional.gelu, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.norm, self.out = nn.LayerNorm(4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.patch(x).flatten(2).transpose(1, 2)
        seen = torch.cat([self.token.expand(len(x), -1, -1), seen], 1) + self.place
        return self.out(self.norm(self.body(seen))[:, 0])


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.norms = (
            nn.Conv2d(2, 4, 4, 4),
            nn.ModuleList(nn.LayerNorm(4) for _ in range(2)),
        )
        self.tokens = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
        self.channels = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
        self.out = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.patch(x).flatten(2).transpose(1, 2)
        seen = seen + self.tokens(self.norms[0](seen).transpose(1, 2)).transpose(1, 2)
        return self.out((seen + self.channels(self.norms[1](seen))).mean(1))


class TiedAutoencoder(nn.Module):
    """A decoder that uses the transpose of the encoder's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.bias, self.out = (
            nn.Linear(6, 4),
            nn.Parameter(torch.zeros(6)),
            nn.Linear(6, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.out(
            functional.linear(torch.tanh(self.encode(x)), self.encode.weight.t(), self.bias) - x
        )


class TiedLanguage(nn.Module):
    """The output layer's weight is the embedding's; classes are words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(WORDS, 4), nn.Linear(4, 4)
        self.out = nn.Linear(4, WORDS, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mix(self.embed(x))).mean(1))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.inner = nn.Conv2d(2, 3, 3, 1, 1), nn.Conv2d(3, 4, 3, 1, 1)
        self.up, self.join = nn.ConvTranspose2d(4, 3, 2, 2), nn.Conv2d(6, 3, 3, 1, 1)
        self.norm, self.out = nn.GroupNorm(1, 3), nn.Conv2d(3, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = functional.relu(self.norm(self.down(x)))
        inner = functional.relu(self.inner(functional.max_pool2d(first, 2)))
        return self.out(functional.relu(self.join(torch.cat([first, self.up(inner)], 1)))).mean(
            (2, 3)
        )


class Shared(nn.Module):
    """One layer used three times, and once more under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(6, 6), nn.Linear(6, CLASSES)
        self.layers = nn.ModuleList([self.layer, self.layer])
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, self.layer):
            x = self.drop(torch.tanh(layer(x)))
        return self.out(x)


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def parametrised() -> nn.Module:
    layer = nn.Linear(6, 6)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(6, CLASSES))


def frozen_backbone() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 4), nn.ReLU(),
                        nn.Linear(4, CLASSES))  # fmt: skip
    for parameter in net[:5].parameters():
        parameter.requires_grad_(False)
    return net


class FrozenNorm(nn.Module):
    """Batch norm that its owner keeps in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(6), nn.Linear(6, CLASSES)

    def train(self, mode: bool = True) -> "FrozenNorm":
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


class OwnParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = (
            nn.Parameter(torch.randn(CLASSES, 6) * 0.3),
            nn.Parameter(torch.zeros(CLASSES)),
        )
        self.scales = nn.ParameterList([torch.ones(6), torch.ones(6) * 0.5])

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x * self.scales[0] + x.roll(1, 1) * self.scales[1], self.w, self.b)


class Drops(nn.Module):
    """Dropout in every form that is a function."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(2, 3, 3), nn.Linear(3, CLASSES)
        self.alpha = nn.AlphaDropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout2d(functional.dropout(x, 0.2, self.training), 0.2, self.training)
        x = functional.feature_alpha_dropout(self.conv(x), 0.2, self.training)
        x = functional.rrelu(x, training=self.training)
        x = functional.rrelu(x, training=self.training, inplace=True).mean((2, 3))
        return self.out(self.alpha(functional.dropout(x, 0.1, self.training, inplace=True)))


class Noisy(nn.Module):
    """Draws by torch's functions, also in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = (
            x
            + 0.1 * torch.randn_like(x)
            + 0.1 * torch.rand(x.shape) * torch.bernoulli(torch.full_like(x, 0.5))
        )
        if self.training:
            x = (
                x * torch.normal(1.0, 0.1, (6,))
                + 0.01 * x.new_empty(x.shape).uniform_()
                + 0.01 * torch.randint(0, 3, (6,))
            )
            x = x + 0.01 * functional.gumbel_softmax(x, 1.0)
        return self.out(x)


class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.out = (
            nn.ModuleList(nn.Linear(6, 6) for _ in range(2)),
            nn.Linear(6, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            kept = x.new_empty(len(x), 1).bernoulli_(0.7) / 0.7 if self.training else 1.0
            x = x + kept * torch.tanh(layer(x))
        return self.out(x)


class Centred(nn.Module):
    """Norms by the batch, but not by a batch-norm layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(6, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.out(torch.tanh(x - x.mean(0)))


class Counts(nn.Module):
    """A buffer that training changes: a running mean of what passes."""

    mean: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, CLASSES)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("table", torch.linspace(0, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.out(x - self.mean + self.table)


class InADict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": x, "logits": self.out(x)}


class InATuple(InADict):
    def forward(self, x: Tensor) -> Any:
        return x, super().forward(x)["logits"]


def batch_norm(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels)


def group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(2, channels)


CASES: dict[str, Case] = {
    "resnet-18, batch norm": Case(lambda: resnet18(batch_norm), "image"),
    "resnet-18, group norm": Case(lambda: resnet18(group_norm), "image"),
    "lstm": Case(lambda: Recurrent(nn.LSTM, num_layers=2, dropout=0.3), "tokens"),
    "gru, both ways": Case(lambda: Recurrent(nn.GRU, bidirectional=True), "tokens"),
    "rnn": Case(lambda: Recurrent(nn.RNN), "tokens"),
    "transformer encoder": Case(Encoder, "tokens"),
    "transformer decoder, non-persistent buffers": Case(Decoder, "tokens"),
    "multi-head attention": Case(Attention, "vector"),
    "fused attention": Case(Fused, "tokens"),
    "vit": Case(ViT, "image"),
    "mlp-mixer": Case(Mixer, "image"),
    "tied autoencoder": Case(TiedAutoencoder, "vector"),
    "tied language model": Case(TiedLanguage, "tokens"),
    "u-net": Case(UNet, "image"),
    "shared layers": Case(Shared, "vector"),
    "spectral norm": Case(
        lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 4)), nn.Tanh(), nn.Linear(4, CLASSES)), "vector"
    ),
    "weight norm": Case(
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 4)), nn.Tanh(), nn.Linear(4, CLASSES)), "vector"
    ),
    "own parametrisation": Case(parametrised, "vector"),
    "frozen backbone": Case(frozen_backbone, "image"),
    "batch norm kept in evaluation mode": Case(FrozenNorm, "vector"),
    "own parameters": Case(OwnParameters, "vector"),
    "dropout functions": Case(Drops, "image"),
    "random functions": Case(Noisy, "vector"),
    "stochastic depth": Case(StochasticDepth, "vector"),
    "examples that depend on each other": Case(Centred, "vector"),
    "own buffers": Case(Counts, "vector"),
    "layer and instance norm": Case(
        lambda: nn.Sequential(nn.InstanceNorm2d(2, affine=True, track_running_stats=True), nn.Conv2d(2, 3, 3), nn.Flatten(),
                              nn.LayerNorm(108), nn.Linear(108, CLASSES)), "image"
    ),
    "a dict": Case(InADict, "vector", lambda found: found["logits"]),
    "a tuple": Case(InATuple, "vector", lambda found: found[1], 1),
}  # fmt: skip
