"""Attacks on uploads: u_k is a client's update, its weights less those sent, or its gradient.

sign_flip: Li, Xu, Chen, Giannakis, Ling, "RSA: Byzantine-robust stochastic aggregation methods for
distributed learning from heterogeneous datasets", AAAI 2019, arXiv:1811.03761.
scaling: Bagdasaryan, Veit, Hua, Estrin, Shmatikov, "How to backdoor federated learning", AISTATS
2020, arXiv:1807.00459.
gaussian: Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine learning with adversaries", NIPS 2017,
arXiv:1703.02757.
"""

import math

import torch
from torch import Tensor

from feddkd.method.upload_changes import ATTACK
from feddkd.randomness import uniform
from feddkd.rounds.attacks.rule import ATTACKS, Attack, Malicious
from feddkd.spec.types import Positive
from feddkd.tensors import Tensors, combine

LEAST = 2.0**-25  # half the step of `uniform`: its logarithm exists


@ATTACKS.register
def sign_flip(who: Malicious, *, scale: Positive = 1.0) -> Attack:
    """Malicious clients send -scale u_k."""
    return Attack(who, upload=lambda update, key: combine(lambda u: -scale * u, update))


@ATTACKS.register
def scaling(who: Malicious, *, factor: Positive = 10.0) -> Attack:
    """Malicious clients send factor u_k."""
    return Attack(who, upload=lambda update, key: combine(lambda u: factor * u, update))


@ATTACKS.register
def gaussian(who: Malicious, *, deviation: Positive = 1.0) -> Attack:
    """Malicious clients send normal numbers of mean 0 and this deviation in place of u_k."""

    def upload(update: Tensors, key: Tensor) -> dict[str, Tensor]:
        return {
            name: deviation * normal(key, update[name], 2 * number)
            for number, name in enumerate(sorted(update))
        }

    return Attack(who, upload=upload)


def normal(key: Tensor, like: Tensor, stream: int) -> Tensor:
    """Return normal numbers of the shape and the type of `like`, by Box and Muller's formula."""
    first, second = (
        uniform(key, tuple(like.shape), ATTACK + stream + n).double() for n in range(2)
    )
    radius = (-2 * (first + LEAST).log()).sqrt()
    return (radius * torch.cos(2 * math.pi * second)).to(like.dtype)
