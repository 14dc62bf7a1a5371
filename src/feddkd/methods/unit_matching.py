"""Matched averaging: the units of several networks are matched before they are averaged.

    minimise over permutations pi_k:  sum_k p_k |theta - U_k[pi_k]|^2
    theta = sum_k p_k U_k[pi_k],   sum_k p_k = 1

U_k holds the units of client k in a layer, one row for each: incoming weights and bias. The
Hungarian algorithm assigns one client at a time to the average of the others, which never raises
the sum. It sweeps over the clients a few times and ends early if nothing changes.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from feddkd.models.layer_chain import Layer, move_inputs, move_units
from feddkd.tensors import Tensors, stack, weighted_mean

Array = npt.NDArray[np.float64]


def matched_average(
    layers: Sequence[Layer],
    models: Sequence[Tensors],
    weights: Sequence[float],
    sweeps: int,
    head: Tensor | None = None,
) -> tuple[dict[str, Tensor], list[Tensor] | None]:
    """Return the matched average of consecutive layers, and the orders of the last layer's units.

    The inputs of the first layer must have the same order in all networks. The second result holds
    for each network the order in which its units of the last layer were averaged. With `head` the
    last of the layers is the network's last: its outputs keep their order, head[k, c] is the weight
    of network k for output c, and the second result is None.
    """
    average: dict[str, Tensor] = {}
    orders: list[Tensor] | None = None
    for layer in layers:
        parts = [{name: model[name] for name in layer.names} for model in models]
        if orders is not None:
            for part, order in zip(parts, orders, strict=True):
                part[layer.weight] = move_inputs(layer, part[layer.weight], order)
        if head is not None and layer is layers[-1]:
            return {**average, **_average_outputs(layer, parts, head)}, None
        matched, orders = _match(layer, parts, weights, sweeps)
        average |= matched
    return average, orders


def _match(
    layer: Layer, models: Sequence[Tensors], weights: Sequence[float], sweeps: int
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return the matched average of one layer, and the order of the units of each network.

    The inputs of the layer must have the same order in all networks.
    """
    units = [_units(layer, model) for model in models]
    arrays = [rows.detach().double().cpu().numpy() for rows in units]
    orders = []
    moved = []
    for model, rows, order in zip(models, units, assign(arrays, weights, sweeps), strict=True):
        orders.append(torch.from_numpy(order).to(rows.device))
        moved.append(move_units(layer, dict(model), orders[-1]))
    return weighted_mean(stack(moved), weights), orders


def _units(layer: Layer, model: Tensors) -> Tensor:
    """Return the units of a layer, one row for each: incoming weights and bias."""
    tensors = [model[name] for name in layer.inputs]
    return torch.cat([t.flatten(1) if t.dim() > 1 else t[:, None] for t in tensors], 1)


def assign(
    units: Sequence[Array], weights: Sequence[float], sweeps: int
) -> list[npt.NDArray[np.int64]]:
    """Return for each network the order of its units that matches them to those of the others.

    Networks are assigned in the order of their weights, the largest first.
    """
    shares = np.asarray(weights, np.float64) / np.sum(weights)
    by_weight = sorted(range(len(units)), key=lambda k: -shares[k])
    orders = [np.arange(len(rows)) for rows in units]
    first, *later = by_weight
    running = shares[first] * units[first]
    for k in later:
        orders[k] = _best(running, units[k])
        running = running + shares[k] * units[k][orders[k]]
    for _ in range(sweeps if later else 0):
        before = list(orders)
        for k in by_weight:
            others = running - shares[k] * units[k][orders[k]]
            orders[k] = _best(others, units[k])
            running = others + shares[k] * units[k][orders[k]]
        if all((old == new).all() for old, new in zip(before, orders, strict=True)):
            break
    return orders


def _best(target: Array, units: Array) -> npt.NDArray[np.int64]:
    """Return the order of the units that is nearest to the target.

    All units are used, so the sum of squares in |target - unit|^2 is the same for all orders; only
    the products differ.
    """
    # imported here: it takes half a second, and few methods need it
    from scipy.optimize import linear_sum_assignment

    return np.asarray(linear_sum_assignment(target @ units.T, maximize=True)[1], np.int64)


def _average_outputs(layer: Layer, models: Sequence[Tensors], head: Tensor) -> dict[str, Tensor]:
    """Return the average of the last layer: output c has the weights head[:, c]."""
    stacked = stack(models)
    # head may hold whole numbers, whose quotient would be float32
    shares = head.double() / head.double().sum(0)

    def mean(tensor: Tensor) -> Tensor:
        weights = shares.to(tensor.dtype).reshape(*shares.shape, *(1,) * (tensor.dim() - 2))
        return (weights * tensor).sum(0)

    even = weighted_mean(stacked, [1.0] * len(models))
    return {
        name: mean(tensor) if name in layer.by_unit else even[name]
        for name, tensor in stacked.items()
    }
