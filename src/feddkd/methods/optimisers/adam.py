"""Adam and the optimisers that are made from its step: AdamW and LAMB."""

import torch
from torch import Tensor

from feddkd.methods.optimisers.optimiser import Optimiser
from feddkd.tensors import Groups, Tensors, add, combine, zeros


def adam(
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
) -> Optimiser:
    """Return Adam as torch.optim.Adam: weight decay is added to the gradient (not AdamW).

    amsgrad divides by the root of the largest second moment so far.
    """

    def init(params: Tensors) -> Groups:
        device = next(iter(params.values())).device
        count = {"count": torch.zeros((), dtype=torch.float64, device=device)}
        moments = {"first": zeros(params), "second": zeros(params), "count": count}
        return {**moments, "largest": zeros(params)} if amsgrad else moments

    def update(
        params: Tensors, grads: Tensors, state: Groups, lr: Tensor
    ) -> tuple[Tensors, Groups]:
        grads = add(grads, params, weight_decay) if weight_decay else grads
        count = state["count"]["count"] + 1
        first = combine(lambda m, g: beta1 * m + (1 - beta1) * g, state["first"], grads)
        second = combine(lambda v, g: beta2 * v + (1 - beta2) * g * g, state["second"], grads)
        after = {"first": first, "second": second, "count": {"count": count}}
        if amsgrad:
            after["largest"] = combine(torch.maximum, state["largest"], second)
        # in float64: in float32 1 - beta2 would lose four digits in the first steps
        step = (lr.double() / (1 - beta1**count)).to(lr.dtype)
        root = (1 - beta2**count).sqrt().to(lr.dtype)

        def move(w: Tensor, m: Tensor, v: Tensor) -> Tensor:
            return w - step * m / (v.sqrt() / root + eps)

        return combine(move, params, first, after["largest" if amsgrad else "second"]), after

    return Optimiser(init, update)


def adamw(
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
) -> Optimiser:
    """Return AdamW as torch.optim.AdamW: w <- (1 - lr weight_decay) w, then Adam's step."""
    plain = adam(beta1=beta1, beta2=beta2, eps=eps, amsgrad=amsgrad)

    def update(
        params: Tensors, grads: Tensors, state: Groups, lr: Tensor
    ) -> tuple[Tensors, Groups]:
        shrunk = combine(lambda w: w * (1 - lr * weight_decay), params)
        return plain.update(shrunk, grads, state, lr)

    return Optimiser(plain.init, update)


def lamb(
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Optimiser:
    """Return LAMB (You et al., ICLR 2020, arXiv:1904.00962, Algorithm 2), for each tensor w:

        w <- w - lr |w| / |u| u,   u = r + weight_decay w,   r = Adam's direction

    Where |w| or |u| is zero, the factor |w| / |u| is 1. The paper's function phi is the identity.
    """
    plain = adam(beta1=beta1, beta2=beta2, eps=eps)

    def update(
        params: Tensors, grads: Tensors, state: Groups, lr: Tensor
    ) -> tuple[Tensors, Groups]:
        # Adam's step from zero at rate 1 leads to -r
        minus_r, after = plain.update(zeros(params), grads, state, torch.ones_like(lr))

        def move(w: Tensor, minus_r: Tensor) -> Tensor:
            u = weight_decay * w - minus_r
            w_norm, u_norm = torch.linalg.vector_norm(w), torch.linalg.vector_norm(u)
            ratio = torch.where((w_norm > 0) & (u_norm > 0), w_norm / u_norm, 1.0)
            return w - lr * ratio * u

        return combine(move, params, minus_r), after

    return Optimiser(plain.init, update)
