"""Optimisers that divide by the root of a second moment without correcting its bias."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from feddkd.methods.optimisers.optimiser import Optimiser
from feddkd.tensors import Groups, Tensors, add, combine, zeros


def adagrad(*, eps: float = 1e-8, weight_decay: float = 0.0) -> Optimiser:
    """Return Adagrad as torch.optim.Adagrad: v <- v + g^2;  w <- w - lr g / (sqrt(v) + eps).

    Weight decay is part of the gradient g.
    """

    def init(params: Tensors) -> Groups:
        return {"second": zeros(params)}

    def update(
        params: Tensors, grads: Tensors, state: Groups, lr: Tensor
    ) -> tuple[Tensors, Groups]:
        grads = add(grads, params, weight_decay) if weight_decay else grads
        second = combine(lambda v, g: v + g * g, state["second"], grads)
        moved = combine(lambda w, g, v: w - lr * g / (v.sqrt() + eps), params, grads, second)
        return moved, {"second": second}

    return Optimiser(init, update)


def rmsprop(
    *, beta2: float = 0.999, eps: float = 1e-8, momentum: float = 0.0, weight_decay: float = 0.0
) -> Optimiser:
    """Return RMSprop as torch.optim.RMSprop, with beta2 for torch's alpha.

        v <- beta2 v + (1 - beta2) g^2;  u <- momentum u + g / (sqrt(v) + eps);  w <- w - lr u

    Weight decay is part of the gradient g.
    """

    def init(params: Tensors) -> Groups:
        velocity = {"velocity": zeros(params)} if momentum else {}
        return {"second": zeros(params), **velocity}

    def update(
        params: Tensors, grads: Tensors, state: Groups, lr: Tensor
    ) -> tuple[Tensors, Groups]:
        grads = add(grads, params, weight_decay) if weight_decay else grads
        second = combine(lambda v, g: beta2 * v + (1 - beta2) * g * g, state["second"], grads)
        direction = combine(lambda g, v: g / (v.sqrt() + eps), grads, second)
        if not momentum:
            return add(params, direction, -lr), {"second": second}
        velocity = add(direction, state["velocity"], momentum)
        return add(params, velocity, -lr), {"second": second, "velocity": velocity}

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
