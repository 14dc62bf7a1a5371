"""Comparison of two tensors that should hold the same numbers."""

import torch
from torch import Tensor

# rounding errors in float64 and in other types, relative to the largest number
EXACT, COARSE = 1e-9, 1e-3
CHUNK = 1 << 22  # numbers that are compared at a time: copies in float64 take memory


def is_same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same shape and numbers; NaN counts as 0."""
    return a.shape == b.shape and bool(torch.equal(a.nan_to_num(), b.nan_to_num()))


def is_close(a: Tensor, b: Tensor, tolerance: float | None = None, least: float = 1e-6) -> bool:
    """Return whether two tensors differ by rounding errors only.

    The errors are relative to the largest number, or to `least` if that is larger.
    """
    if a.shape != b.shape:
        return False
    if not a.is_floating_point() or not a.numel():
        return bool(torch.equal(a, b))
    if tolerance is None:
        tolerance = EXACT if a.dtype == torch.float64 else COARSE
    errors, sizes = [], []
    chunks = (torch.split(tensor.reshape(-1), CHUNK) for tensor in (a, b))
    for part, other in zip(*chunks, strict=True):
        part, other = part.double().nan_to_num(), other.double().nan_to_num()
        errors.append((part - other).abs().max())
        sizes.append(part.abs().max())
    bound = tolerance * torch.stack(sizes).max().clamp(min=max(least, 1e-6))
    return bool(torch.stack(errors).max() <= bound)
