"""Gradients for flat minima, taken at some distance from the weights: Foret, Kleiner, Mobahi,
Neyshabur, "Sharpness-aware minimization for efficiently improving generalization", ICLR 2021,
arXiv:2010.01412.

    g = grad f(w + e),   e = rho grad f(w) / |grad f(w)|

The norm is that of all tensors together. Running statistics of batch norm change as in the pass at
w, and not again in the pass at w + e.
"""

from torch import Tensor

from feddkd.methods.local import Slope, Take
from feddkd.models.functional import Output
from feddkd.tensors import Groups, Tensors, add, combine, norm

TINY = 1e-12  # in place of a norm of zero


def scaled(direction: Tensors, rho: float) -> dict[str, Tensor]:
    """Return rho d / |d|; zero for a direction that is zero."""
    length = norm(direction) + TINY
    return combine(lambda d: rho * d / length, direction)


def sharpness_aware(rho: float) -> Take:
    """Return a `take` of local training: the gradient at w + rho g / |g|, g the gradient at w."""

    def take(slope: Slope, sent: Groups, carry: Groups) -> tuple[Tensors, Output, Groups]:
        gradient, output = slope(carry["params"])
        steep, _ = slope(add(carry["params"], scaled(gradient, rho)))
        return steep, output, {}

    return take
