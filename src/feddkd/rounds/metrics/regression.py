"""Metrics of numbers: outputs and targets (batch,) or (batch, numbers)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from feddkd.errors import InputError
from feddkd.rounds.metrics.metric import Metric, register
from feddkd.rounds.metrics.positions import present
from feddkd.rounds.metrics.probabilities import mean

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from feddkd.method import Batch
    from feddkd.tensors import Tensors

FLAT = 1e-12  # targets vary by less than this share of their squares: their variance is rounding


def _errors(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return output less target, and the target, as (batch, numbers); 0 for padding.

    An output that is no number is infinitely wrong.
    """
    if output.shape[1:].numel() != batch.y.shape[1:].numel():
        raise InputError(
            "a metric of numbers needs one target for each output; the targets have the shape"
            f" {tuple(batch.y.shape)}, the outputs have {tuple(output.shape)}"
        )
    target = batch.y.double().reshape(len(batch.y), -1)
    error = (output.double().reshape(target.shape) - target).nan_to_num(math.inf, math.inf)
    there = (batch.share > 0).unsqueeze(-1)
    return error.where(there, 0), target.where(there, 0)


def _summed(size: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Batch], Tensors]:
    """Return the function that sums the sizes of errors."""

    def sums(output: Tensor, batch: Batch) -> Tensors:
        error, _ = _errors(output, batch)
        return {"sum": size(error).sum(), "count": present(batch).sum() * error.shape[-1]}

    return sums


def _moments(output: Tensor, batch: Batch) -> Tensors:
    """Return for each of the numbers the sums of squared errors, targets and their squares."""
    error, target = _errors(output, batch)
    return {
        "residual": error.square().sum(0),
        "sum": target.sum(0),
        "squares": target.square().sum(0),
        "count": present(batch).sum(),
    }


def _r2(sums: Tensors) -> Tensor:
    """Return 1 - sum (y - f)^2 / sum (y - mean y)^2, averaged over the numbers of an output.

    Numbers whose targets do not vary are left out; NaN if none is left.
    """
    squares, total = sums["squares"], sums["sum"]
    spread = squares - total.square() / sums["count"].unsqueeze(-1)
    varies = spread > FLAT * squares
    each = (1 - sums["residual"] / spread).where(varies, 0)
    return each.sum(-1) / varies.sum(-1)


def _error(
    name: str,
    title: str,
    size: Callable[[Tensor], Tensor],
    value: Callable[[Tensors], Tensor] = mean,
) -> None:
    """Register a metric that is made from the mean size of errors."""
    register(Metric(name, title, _summed(size), value, higher_is_better=False, percent=False))


_error("mse", "MSE", lambda error: error.square())
_error("rmse", "RMSE", lambda error: error.square(), lambda sums: mean(sums).sqrt())
_error("mae", "MAE", lambda error: error.abs())
register(Metric("r2", "R2", _moments, _r2, percent=False, skips_undefined=True))
