"""Which units of several networks do the same work: matched averaging, layer by layer, by the
Hungarian algorithm.

    minimise over permutations pi_k:  sum_k p_k |theta - U_k[pi_k]|^2,  theta = sum_k p_k U_k[pi_k],  sum_k p_k = 1

U_k are client k's units in a layer, a row each: incoming weights and bias. One client at a time is
assigned to the average of the others, which never raises the sum; a few sweeps over the clients, or
fewer where nothing moves any more.
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
    """Some layers of several networks, the inputs of the first in one order: matched, moved and
    averaged one after another.

    With `head` the last layer is the network's last: its outputs have their meaning and stay, and
    the numbers in head, one row a network and one column an output, say how much each counts.
    Returns the average, and the order that the units of the last layer have to be put in, network
    by network, where they are not outputs.
    """
    average: dict[str, Tensor] = {}
    orders: list[Tensor] | None = None
    for layer in layers:
        own = [{name: model[name] for name in layer.names} for model in models]
        if orders is not None:
            own = [
                {**one, layer.weight: move_inputs(layer, one[layer.weight], o)}
                for one, o in zip(own, orders, strict=True)
            ]
        if head is not None and layer is layers[-1]:
            return {**average, **_average_outputs(layer, own, head)}, None
        matched, orders = _match(layer, own, weights, sweeps)
        average |= matched
    return average, orders


def _match(
    layer: Layer, models: Sequence[Tensors], weights: Sequence[float], sweeps: int
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """One layer of several networks whose inputs agree: its matched average, and the order of units
    that each network needs.
    """
    units = [
        torch.cat(
            [
                model[name].flatten(1) if model[name].dim() > 1 else model[name][:, None]
                for name in layer.inputs
            ],
            1,
        )
        for model in models
    ]
    found = assign([own.detach().double().cpu().numpy() for own in units], weights, sweeps)
    orders = [
        torch.from_numpy(order).to(own.device) for order, own in zip(found, units, strict=True)
    ]
    moved = [
        move_units(layer, dict(model), order) for model, order in zip(models, orders, strict=True)
    ]
    return weighted_mean(stack(moved), weights), orders


def assign(
    units: Sequence[Array], weights: Sequence[float], sweeps: int
) -> list[npt.NDArray[np.int64]]:
    """For each network the order in which its units stand beside those of the others.

    The heaviest network begins.
    """
    shares = np.asarray(weights, np.float64) / np.sum(weights)
    order_of_turns = sorted(range(len(units)), key=lambda k: -shares[k])
    orders = [np.arange(len(own)) for own in units]
    first, *later = order_of_turns
    running = shares[first] * units[first]
    for k in later:
        orders[k] = _best(running, units[k])
        running = running + shares[k] * units[k][orders[k]]
    for _ in range(sweeps if later else 0):
        before = list(orders)
        for k in order_of_turns:
            others = running - shares[k] * units[k][orders[k]]
            orders[k] = _best(others, units[k])
            running = others + shares[k] * units[k][orders[k]]
        if all((old == new).all() for old, new in zip(before, orders, strict=True)):
            break
    return orders


def _best(target: Array, units: Array) -> npt.NDArray[np.int64]:
    """The order nearest to the target. With all units in use the squares in |target - unit|^2 add
    up to the same: what is left are the products.
    """
    from scipy.optimize import (
        linear_sum_assignment,  # here: it takes half a second to import, and few need it
    )

    return np.asarray(linear_sum_assignment(target @ units.T, maximize=True)[1], np.int64)


def _average_outputs(layer: Layer, models: Sequence[Tensors], head: Tensor) -> dict[str, Tensor]:
    """The last layer: output c is the average by head[:, c], one column an output, one row a
    network.
    """
    stacked = stack(models)
    # counts are whole numbers, and those divide into float32
    shares = head.double() / head.double().sum(0)

    def mean(tensor: Tensor) -> Tensor:
        own = shares.to(tensor.dtype).reshape(*shares.shape, *(1,) * (tensor.dim() - 2))
        return (own * tensor).sum(0)

    even = weighted_mean(stacked, [1.0] * len(models))
    return {
        name: mean(tensor) if name in layer.by_unit else even[name]
        for name, tensor in stacked.items()
    }
