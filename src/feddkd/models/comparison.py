"""Comparison of two tensors that should hold the same numbers."""

import torch
from torch import Tensor

# rounding errors in float64 and in other types, relative to the largest number
EXACT, COARSE = 1e-9, 1e-3


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
    a, b = a.double().nan_to_num(), b.double().nan_to_num()
    return bool((a - b).abs().max() <= tolerance * a.abs().max().clamp(min=max(least, 1e-6)))
