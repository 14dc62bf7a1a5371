"""FedMedian: Yin, Chen, Ramchandran, Bartlett, "Byzantine-robust distributed learning: towards
optimal statistical rates", ICML 2018, arXiv:1803.01498.

    w = median_k w_k, coordinate by coordinate,   w_k = local training from w_t

The paper takes the median of gradients at shared weights, one step in each round; here it is the
median of locally trained weights, as is usual in federated learning. Clients have equal weights,
whatever the number of their examples. For an even number of clients the median is the mean of the
two values in the middle.
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

# the server needs the upload of each client, not their mean
EVERY_CLIENT = {"params": Collect.EVERY, "buffers": Collect.EVERY}


def fedmedian(local: Local) -> Method:
    """Coordinate-wise median of locally trained weights: w = median_k w_k."""
    return local_training(local, Variant(collect=EVERY_CLIENT, server=take_median))


def take_median(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
    """Return the state with the median of the clients' models as the shared model."""
    params = combine(_median, collected["params"])
    buffers = combine(_median, collected["buffers"])
    return {**state, "params": params, "buffers": buffers}


def _median(stacked: Tensor) -> Tensor:
    """Return the median over the first axis, the clients.

    For tensors of whole numbers (counters of batch norm) it returns the largest value.
    """
    if not stacked.is_floating_point():
        return stacked.amax(0)
    ordered, last = torch.sort(stacked, 0).values, len(stacked) - 1
    return (ordered[last // 2] + ordered[(last + 1) // 2]) / 2
