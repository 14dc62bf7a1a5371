"""FedMedian: Yin, Chen, Ramchandran, Bartlett, "Byzantine-robust distributed learning: towards
optimal statistical rates", ICML 2018, arXiv:1803.01498.

    w = median_k w_k, coordinate by coordinate,   w_k = local training from w_t

The paper takes the median of gradients at shared weights, one step a round; here it is that of
locally trained weights, as is usual in federated learning. Clients count alike, however many
examples they hold; of an even number the two in the middle are averaged.
"""

import torch
from torch import Tensor

from feddkd.extend import (
    Collect,
    Groups,
    Local,
    Method,
    Model,
    Tensors,
    Variant,
    combine,
    local_training,
)

# the server needs each client's, not their mean
EVERYBODY = {"params": Collect.EVERY, "buffers": Collect.EVERY}


def fedmedian(local: Local) -> Method:
    """Coordinate-wise median of locally trained weights, which a minority of bad clients cannot
    move far: w = median_k w_k.
    """
    return local_training(local, Variant(collect=EVERYBODY, server=take_median))


def take_median(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
    return {
        **state,
        "params": combine(_median, collected["params"]),
        "buffers": combine(_median, collected["buffers"]),
    }


def _median(stacked: Tensor) -> Tensor:
    """Over the first axis, the clients.

    Whole numbers (batch norm's counters) are not averaged: the largest is kept.
    """
    if not stacked.is_floating_point():
        return stacked.amax(0)
    ordered, last = torch.sort(stacked, 0).values, len(stacked) - 1
    return (ordered[last // 2] + ordered[(last + 1) // 2]) / 2
