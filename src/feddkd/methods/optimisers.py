"""Optimisers as pairs of pure functions.

Their state is groups of tensors. A client has them in its carry, with fresh values in every round;
a server has them in its state, as long as the run lasts.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from feddkd.tensors import Groups, Tensors, add, combine, norm, zeros


class Optimiser(NamedTuple):
    """An optimiser: `init` makes its state, `update` makes one step."""

    init: Callable[[Tensors], Groups]  # params -> state
    # (params, grads, state, lr) -> (params, state)
    update: Callable[[Tensors, Tensors, Groups, Tensor], tuple[Tensors, Groups]]


def sgd(*, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> Optimiser:
    """Return SGD as torch.optim.SGD: v <- momentum v + g;  w <- w - lr v.

    Nesterov: w <- w - lr (g + momentum v). Weight decay is part of the gradient g.
    """

    def init(params: Tensors) -> Groups:
        return {"velocity": zeros(params)} if momentum else {}

    def update(
        params: Tensors, grads: Tensors, state: Groups, lr: Tensor
    ) -> tuple[Tensors, Groups]:
        grads = add(grads, params, weight_decay) if weight_decay else grads
        if not momentum:
            return add(params, grads, -lr), {}
        velocity = add(grads, state["velocity"], momentum)
        direction = add(grads, velocity, momentum) if nesterov else velocity
        return add(params, direction, -lr), {"velocity": velocity}

    return Optimiser(init, update)


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


def adaptive(
    rule: Literal["adagrad", "adam", "yogi"],
    *,
    beta1: float,
    beta2: float,
    tau: float,
    initial: float | None = None,
) -> Optimiser:
    """Return a server optimiser of "Adaptive federated optimization" (arXiv:2003.00295).

        m <- b1 m + (1 - b1) g;  w <- w - lr m / (sqrt(v) + tau)
        adagrad: v <- v + g^2
        adam:    v <- b2 v + (1 - b2) g^2
        yogi:    v <- v - (1 - b2) g^2 sign(v - g^2)

    The bias of the moments is not corrected. v begins at `initial`, by default tau^2.
    """
    first_v = tau**2 if initial is None else initial
    rules: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "adagrad": lambda v, g: v + g**2,
        "adam": lambda v, g: beta2 * v + (1 - beta2) * g**2,
        "yogi": lambda v, g: v - (1 - beta2) * g**2 * torch.sign(v - g**2),
    }

    def init(params: Tensors) -> Groups:
        return {
            "first": zeros(params),
            "second": combine(lambda w: torch.full_like(w, first_v), params),
        }

    def update(
        params: Tensors, grads: Tensors, state: Groups, lr: Tensor
    ) -> tuple[Tensors, Groups]:
        first = combine(lambda m, g: beta1 * m + (1 - beta1) * g, state["first"], grads)
        second = combine(rules[rule], state["second"], grads)
        moved = combine(lambda w, m, v: w - lr * m / (v.sqrt() + tau), params, first, second)
        return moved, {"first": first, "second": second}

    return Optimiser(init, update)


def clip_norm(grads: Tensors, most: float) -> dict[str, Tensor]:
    """Return g min(1, most / |g|) with |g| over all tensors, as torch.nn.utils.clip_grad_norm_."""
    scale = (most / (norm(grads) + 1e-6)).clamp(max=1.0)
    return combine(lambda gradient: gradient * scale, grads)
