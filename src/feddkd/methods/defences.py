"""Robust ways to gather the updates of clients, of which some may be malicious.

Median, trimmed mean: Yin, Chen, Ramchandran, Bartlett, ICML 2018, arXiv:1803.01498.
Krum, Multi-Krum: Blanchard, El Mhamdi, Guerraoui, Stainer, NIPS 2017, arXiv:1703.02757.
Geometric median: Pillutla, Kakade, Harchaoui, "Robust aggregation for federated learning", IEEE
Trans. Signal Processing 70 (2022), arXiv:1912.13445.
Centred clipping: Karimireddy, He, Jaggi, "Learning from history for Byzantine robust optimization",
ICML 2021, arXiv:2012.10333.

A defence is a function of the updates u_k, one vector for each of the m clients, and of the last
gathered update v; it returns a gathered update. u_k holds all that a client uploads less what it
was sent, over all tensors together; all clients have equal weights.

    krum        u_i with the smallest s(i) = sum of |u_i - u_j|^2 over its m - f - 2 nearest j
    multi_krum  the mean of the m - f clients with the smallest s(i)
    geometric   v <- sum_k b_k u_k / sum_k b_k,  b_k = 1 / max(nu, |v - u_k|),  32 times, from
                the mean on
    centred     v <- v + 1/m sum_k (u_k - v) min(1, radius / |u_k - v|),  once, from the last v on
"""

from collections.abc import Callable

import torch
from torch import Tensor

from feddkd.tensors import Groups

# (updates (m, d), last gathered update (d,)) -> gathered update (d,)
Defence = Callable[[Tensor, Tensor], Tensor]
SMOOTHING = 1e-6  # nu
ITERATIONS = 32  # of the geometric median; they are at the server alone


def krum(updates: Tensor, last: Tensor, *, faulty: int) -> Tensor:
    """Return the update that is nearest to its neighbours."""
    return updates[scores(updates, faulty).argmin()]


def multi_krum(updates: Tensor, last: Tensor, *, faulty: int) -> Tensor:
    """Return the mean of all but the `faulty` updates that are furthest from their neighbours."""
    best = scores(updates, faulty).argsort(stable=True)[: len(updates) - faulty]
    return updates[best.sort().values].mean(0)


def scores(updates: Tensor, faulty: int) -> Tensor:
    """Return the sum of the squared distances of each update to its m - f - 2 nearest ones; with
    fewer than f + 3 updates, to the nearest one.
    """
    distances = torch.stack([(updates - one).square().sum(1) for one in updates])
    nearest = max(len(updates) - faulty - 2, 1)
    return distances.sort(1).values[:, 1 : 1 + nearest].sum(1)  # the first is its own


def geometric_median(updates: Tensor, last: Tensor) -> Tensor:
    """Return an approximate geometric median by the smoothed algorithm of Weiszfeld."""
    centre = updates.mean(0)
    for _ in range(ITERATIONS):
        distances = torch.linalg.vector_norm(updates - centre, dim=1)
        weights = 1 / distances.clamp(min=SMOOTHING)
        centre = (weights / weights.sum()) @ updates
    return centre


def centred_clipping(updates: Tensor, last: Tensor, *, radius: float) -> Tensor:
    """Return the last gathered update, moved by the mean of the clipped differences from it."""
    away = updates - last
    norms = torch.linalg.vector_norm(away, dim=1, keepdim=True)
    factors = (radius / norms.clamp(min=torch.finfo(away.dtype).tiny)).clamp(max=1)
    moved: Tensor = last + (away * factors).mean(0)
    return moved


# --- between uploads and vectors


def updates_of(collected: Groups, origin: Groups) -> Tensor:
    """Return the clients' updates as rows, from uploads that are stacked."""
    rows = [
        (tensor - origin[group][name] if group in origin else tensor).flatten(1)
        for group, tensors in collected.items()
        for name, tensor in tensors.items()
        if tensor.is_floating_point()
    ]
    return torch.cat(rows, 1)


def uploads_of(update: Tensor, collected: Groups, origin: Groups) -> dict[str, dict[str, Tensor]]:
    """Return an update as the upload that it stands for; counters are the largest of all."""
    found: dict[str, dict[str, Tensor]] = {group: {} for group in collected}
    start = 0
    for group, tensors in collected.items():
        for name, tensor in tensors.items():
            if not tensor.is_floating_point():
                found[group][name] = tensor.amax(0)
                continue
            size = tensor[0].numel()
            move = update[start : start + size].reshape(tensor.shape[1:])
            found[group][name] = origin[group][name] + move if group in origin else move
            start += size
    return found
