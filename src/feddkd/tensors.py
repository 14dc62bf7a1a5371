"""Arithmetic on named tensors.

`Tensors` is one group ({"fc.weight": ..., ...}); `Groups` is what travels or stays: {"params": ...,
"buffers": ..., ...}. Nothing here changes its arguments.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

Tensors = Mapping[str, Tensor]
Groups = Mapping[str, Tensors]


def combine(function: Callable[..., Tensor], *operands: Tensors) -> dict[str, Tensor]:
    """Apply a function name by name, over the names of the first operand."""
    return {name: function(*(operand[name] for operand in operands)) for name in operands[0]}


def add(a: Tensors, b: Tensors, scale: Tensor | float = 1.0) -> dict[str, Tensor]:
    """a + scale * b"""
    return combine(lambda x, y: x + scale * y, a, b)


def add_at_once(a: Tensors, b: Tensors, scale: Tensor | float = 1.0) -> dict[str, Tensor]:
    """The same to the bit, with two launches for all tensors together; not under vmap, which knows
    no operations on lists.
    """
    if not a:
        return {}
    scaled = torch._foreach_mul([b[name] for name in a], scale)
    return dict(zip(a, torch._foreach_add(list(a.values()), scaled), strict=True))


def zeros(like: Tensors) -> dict[str, Tensor]:
    return combine(torch.zeros_like, like)


def stack(many: Sequence[Tensors]) -> dict[str, Tensor]:
    """One group whose tensors have a leading axis over the given groups."""
    return combine(lambda *tensors: torch.stack(tensors), *many)


def weighted_mean(stacked: Tensors, weights: Sequence[float]) -> dict[str, Tensor]:
    """sum_k p_k stacked[k], p = weights / sum(weights).

    Whole numbers (counters) are not averaged: the largest is kept.
    """
    given = tuple(weights)

    def mean(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.amax(0)
        own = _shares(given, tensor.dtype, tensor.device).reshape(-1, *(1,) * (tensor.dim() - 1))
        return (own * tensor).sum(0)

    return combine(mean, stacked)


@lru_cache(maxsize=64)
def _shares(weights: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Weights that sum to one.

    Kept: all tensors of a mean share them, and a copy to a GPU costs more than the mean.
    """
    total = float(sum(weights))
    return torch.tensor([weight / total for weight in weights], dtype=torch.float64).to(
        device, dtype
    )


def trimmed_mean(stacked: Tensors, cut: int) -> dict[str, Tensor]:
    """Coordinate by coordinate the mean of all but the `cut` smallest and the `cut` largest; of
    whole numbers the largest.
    """

    def mean(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.amax(0)
        return tensor.sort(0).values[cut : len(tensor) - cut].mean(0)

    return combine(mean, stacked)


def only(group: Tensors, names: Iterable[str]) -> dict[str, Tensor]:
    wanted = set(names)
    return {name: tensor for name, tensor in group.items() if name in wanted}


def without(group: Tensors, names: Iterable[str]) -> dict[str, Tensor]:
    unwanted = set(names)
    return {name: tensor for name, tensor in group.items() if name not in unwanted}


def to(group: Tensors, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Move a group; only floating-point tensors change their type."""
    return {n: t.to(device, dtype if t.is_floating_point() else t.dtype) for n, t in group.items()}


def bytes_of(groups: Groups) -> int:
    """What these groups weigh on the wire, without framing."""
    return sum(
        tensor.numel() * tensor.element_size()
        for group in groups.values()
        for tensor in group.values()
    )


def is_finite(groups: Groups) -> Tensor:
    """Whether every number is, as a tensor: one pass over all of them, and nobody waits for the
    device.
    """
    tensors = [
        tensor
        for group in groups.values()
        for tensor in group.values()
        if tensor.is_floating_point() and tensor.numel()
    ]
    return get_total_norm(tensors, torch.inf).isfinite()
