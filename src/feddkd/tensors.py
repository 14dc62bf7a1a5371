"""Arithmetic on named tensors.

`Tensors` is one group, {"fc.weight": ..., ...}. `Groups` is several groups by name, {"params": ...,
"buffers": ..., ...}: a message, a memo or the server's state. No function changes its arguments.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

Tensors = Mapping[str, Tensor]
Groups = Mapping[str, Tensors]


def combine(function: Callable[..., Tensor], *operands: Tensors) -> dict[str, Tensor]:
    """Return function(tensors of that name) for each name of the first operand."""
    return {name: function(*(operand[name] for operand in operands)) for name in operands[0]}


def add(a: Tensors, b: Tensors, scale: Tensor | float = 1.0) -> dict[str, Tensor]:
    """Return a + scale * b."""
    return combine(lambda x, y: x + scale * y, a, b)


def add_at_once(a: Tensors, b: Tensors, scale: Tensor | float = 1.0) -> dict[str, Tensor]:
    """Return the bits of `add`, with two kernel launches for all tensors together.

    vmap does not support operations on lists of tensors, so this does not work under vmap.
    """
    if not a:
        return {}
    scaled = torch._foreach_mul([b[name] for name in a], scale)
    return dict(zip(a, torch._foreach_add(list(a.values()), scaled), strict=True))


def norm(group: Tensors) -> Tensor:
    """Return the Euclidean norm of all tensors of a group together."""
    return torch.stack([tensor.square().sum() for tensor in group.values()]).sum().sqrt()


def zeros(like: Tensors) -> dict[str, Tensor]:
    """Return a group of zeros with the names, shapes and dtypes of `like`."""
    return combine(torch.zeros_like, like)


def stack(many: Sequence[Tensors]) -> dict[str, Tensor]:
    """Return one group whose tensors have a leading axis over the given groups."""
    return combine(lambda *tensors: torch.stack(tensors), *many)


def weighted_mean(stacked: Tensors, weights: Sequence[float]) -> dict[str, Tensor]:
    """Return sum_k p_k stacked[k], p = weights / sum(weights).

    For tensors of whole numbers (counters) it returns the largest value.
    """
    fixed = tuple(weights)

    def mean(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.amax(0)
        shares = _shares(fixed, tensor.dtype, tensor.device)
        return (shares.reshape(-1, *(1,) * (tensor.dim() - 1)) * tensor).sum(0)

    return combine(mean, stacked)


@lru_cache(maxsize=64)
def _shares(weights: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return weights / sum(weights) as a tensor.

    It is cached: all tensors of a mean use it, and a copy to a GPU costs more than the mean.
    """
    total = float(sum(weights))
    return torch.tensor([weight / total for weight in weights], dtype=torch.float64).to(
        device, dtype
    )


def trimmed_mean(stacked: Tensors, cut: int) -> dict[str, Tensor]:
    """Return the mean of each coordinate without the `cut` smallest and `cut` largest values.

    For tensors of whole numbers (counters) it returns the largest value.
    """

    def mean(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.amax(0)
        return tensor.sort(0).values[cut : len(tensor) - cut].mean(0)

    return combine(mean, stacked)


def only(group: Tensors, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the tensors of a group that have these names."""
    wanted = set(names)
    return {name: tensor for name, tensor in group.items() if name in wanted}


def without(group: Tensors, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the tensors of a group that do not have these names."""
    unwanted = set(names)
    return {name: tensor for name, tensor in group.items() if name not in unwanted}


def to(group: Tensors, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a group on a device; only floating-point tensors change their dtype."""
    return {n: t.to(device, dtype if t.is_floating_point() else t.dtype) for n, t in group.items()}


def bytes_of(groups: Groups) -> int:
    """Return the size of the tensors in bytes, without the framing of a message."""
    return sum(
        tensor.numel() * tensor.element_size()
        for group in groups.values()
        for tensor in group.values()
    )


def is_finite(groups: Groups) -> Tensor:
    """Return a tensor that is True if all floating-point numbers are finite.

    It is one pass over all tensors, and the host does not wait for the device.
    """
    tensors = [
        tensor
        for group in groups.values()
        for tensor in group.values()
        if tensor.is_floating_point() and tensor.numel()
    ]
    return get_total_norm(tensors, torch.inf).isfinite()
