"""LoRA adapters: Hu et al., "LoRA: Low-rank adaptation of large language models", ICLR 2022,
arXiv:2106.09685.

    W = W_0 + alpha / rank B A,   B = 0 at first

W_0, the weight of a linear layer or of a convolution, is frozen; A and B are trained. Tensors have
the names that peft gives them: `base_layer.weight`, `lora_A.default.weight`,
`lora_B.default.weight`. An adapter with a residual R computes with W + R. R is a buffer, zero at
first; local training does not change it, fedex_lora() adds to it.
"""

import math
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor, nn

from feddkd.errors import InputError, choices, unknown
from feddkd.models.skeleton import copied, find_head
from feddkd.spec.types import Count, Positive, checked

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
Patterns = str | Sequence[str]  # a text may hold several, divided by commas


class Factor(nn.Module):
    """One of the two matrices of an adapter."""

    def __init__(self, weight: Tensor, zero: bool) -> None:
        super().__init__()
        self.weight, self.zero = nn.Parameter(weight), zero
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the matrix to zero, or draw it as peft does."""
        if self.zero:
            nn.init.zeros_(self.weight)
        else:
            nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))


class Adapted(nn.Module):
    """A frozen layer with an adapter."""

    residual: Tensor | None

    def __init__(self, layer: Layer, rank: int, alpha: float, residual: bool) -> None:
        super().__init__()
        self.base_layer, self.scale = layer.requires_grad_(False), alpha / rank
        weight = layer.weight.detach()
        a = weight.new_empty(rank, *weight.shape[1:])
        b = weight.new_empty(len(weight), rank, *(1 for _ in weight.shape[2:]))
        self.lora_A = nn.ModuleDict({"default": Factor(a, zero=False)})
        self.lora_B = nn.ModuleDict({"default": Factor(b, zero=True)})
        self.register_buffer("residual", torch.zeros_like(weight) if residual else None)

    @property
    def weight(self) -> Tensor:
        """The whole weight, for code that reads it and does not call the layer."""
        whole = self.base_layer.weight + self.scale * product(*self._factors)
        return whole if self.residual is None else whole + self.residual

    @property
    def bias(self) -> Tensor | None:
        """The bias of the frozen layer."""
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        a, b = self._factors
        output: Tensor = self.base_layer(x) + self.scale * self._up(self._down(x, a), b)
        return output if self.residual is None else output + self._down(x, self.residual)

    @property
    def _factors(self) -> tuple[Tensor, Tensor]:
        a, b = self.lora_A["default"], self.lora_B["default"]
        assert isinstance(a, Factor)
        assert isinstance(b, Factor)
        return a.weight, b.weight

    def _down(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute the layer with another weight and without a bias."""
        if isinstance(self.base_layer, nn.Linear):
            return nn.functional.linear(x, weight)
        output: Tensor = self.base_layer._conv_forward(x, weight, None)
        return output

    def _up(self, x: Tensor, weight: Tensor) -> Tensor:
        if isinstance(self.base_layer, nn.Linear):
            return nn.functional.linear(x, weight)
        convolve = (nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d)
        return convolve[weight.dim() - 3](x, weight)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return B A in the shape of the layer's weight."""
    return (b.flatten(1) @ a.flatten(1)).view(len(b), *a.shape[1:])


def lora(
    net: nn.Module,
    *,
    rank: int = 8,
    alpha: float | None = None,
    targets: Patterns | None = None,
    trained: Patterns | None = None,
    factors: Literal["both", "B"] = "both",
    residual: bool = False,
) -> nn.Module:
    """Return a copy of a network in which only adapters and the head are trained.

    Args:
        net: A network with its pretrained weights.
        rank: The rank of B A, a whole number.
        alpha: B A is multiplied by alpha / rank. By default alpha is the rank.
        targets: The layers that get an adapter: names or patterns such as "q_proj, v_proj" or
            "body.*", of whole names or of their ends. By default all linear layers and
            convolutions but the head.
        trained: Layers that are trained whole. By default the head, which is the last linear layer;
            "" is none.
        factors: With "B" the matrices A are not trained (FFA-LoRA).
        residual: Give each adapter a residual, which fedex_lora() needs.
    """
    if not isinstance(net, nn.Module):
        raise InputError(f"lora: net must be a torch.nn.Module, not {type(net).__name__}")
    rank, residual = checked(rank, Count, "lora: rank"), checked(residual, bool, "lora: residual")
    factors = checked(factors, Literal["both", "B"], "lora: factors")
    size = float(rank if alpha is None else checked(alpha, Positive, "lora: alpha"))
    if name := next(iter(adapters(net)), None):
        raise InputError(f"lora: the network has adapters already, such as {name!r}")
    net = copied(net)
    head = find_head(net, None)
    layers = _targets(net, targets, head)
    whole = {head} if trained is None and head else _matching(net, trained or "", "trained")
    net.requires_grad_(False)
    for name in whole - layers.keys():
        net.get_submodule(name).requires_grad_(True)
    _replace(net, {id(layer): Adapted(layer, rank, size, residual) for layer in layers.values()})
    for adapted in adapters(net).values():
        adapted.lora_A.requires_grad_(factors == "both")
    return net


def adapters(net: nn.Module) -> dict[str, Adapted]:
    """Return the layers of a network that have adapters, by name."""
    return {name: layer for name, layer in net.named_modules() if isinstance(layer, Adapted)}


def _targets(net: nn.Module, patterns: Patterns | None, head: str | None) -> dict[str, Layer]:
    """Return the layers that get an adapter, by name."""
    layers = {name: layer for name, layer in net.named_modules() if isinstance(layer, LAYERS)}
    if "" in layers:
        raise InputError("lora: the network is a single layer: put it into an nn.Sequential")
    if patterns is None:
        found = {
            name: layer
            for name, layer in layers.items()
            if name != head and getattr(layer, "groups", 1) == 1
        }
    else:
        found = {name: layers[name] for name in _matching(net, patterns, "targets", layers)}
    for name, layer in found.items():
        if getattr(layer, "groups", 1) != 1:
            raise InputError(f"lora: {name!r} is a convolution in groups, which gets no adapter")
    if not found:
        raise InputError(
            "lora: no layer gets an adapter; targets may name linear layers and convolutions:"
            f" {choices(layers) or 'there are none'}"
        )
    return found


def _matching(
    net: nn.Module, patterns: Patterns, option: str, among: Iterable[str] | None = None
) -> set[str]:
    """Return the layers that patterns name, of these or of all."""
    names = [name for name, _ in net.named_modules() if name] if among is None else [*among]
    texts = patterns.split(",") if isinstance(patterns, str) else patterns
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise InputError(f"lora: {option} must be a text or a list of texts, not {patterns!r}")
    found = set[str]()
    for pattern in filter(None, map(str.strip, texts)):
        named = {n for n in names if fnmatchcase(n, pattern) or fnmatchcase(n, f"*.{pattern}")}
        if not named:
            raise unknown(f"lora: {option} names no layer {pattern!r}", pattern, names)
        found |= named
    return found


def _replace(net: nn.Module, by_layer: dict[int, Adapted]) -> None:
    """Replace layers by adapted ones, at every place where they are."""
    for parent in list(net.modules()):
        for name, child in list(parent._modules.items()):  # of a layer used twice every place
            if id(child) in by_layer:
                setattr(parent, name, by_layer[id(child)])
