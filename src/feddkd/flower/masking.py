"""Numbers as whole numbers modulo 2^64, and masks over them that cancel in a sum.

    y_k = round(2^32 n_k x_k) + PRG(b_k) + sum_{l > k} PRG(s_kl) - sum_{l < k} PRG(s_kl)   (mod 2^64)

Bonawitz et al., "Practical secure aggregation for privacy-preserving machine learning", CCS 2017,
doi:10.1145/3133956.3133982. The s_kl, which two clients share, cancel when all their uploads are
summed; the b_k, each client's own, keep an upload hidden that comes after its s_kl had to be told.
PRG is ChaCha20: Flower's own generator (pseudo_rand_gen) folds a seed to 32 bits, few enough to try
them all, and its quantisation cuts off silently what is out of range.
"""

from collections.abc import Iterable, Mapping
from functools import reduce

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

from feddkd.flower.wire import WireError
from feddkd.method import Collect
from feddkd.tensors import Groups

Words = NDArray[np.uint64]
BITS = 32  # behind the point: a sum of m numbers is off by m 2^-33 at most
WORD = np.dtype("<u8")


def weights(collect: Mapping[str, Collect], examples: int, clients: int = 1) -> dict[str, int]:
    """What a client's upload weighs, group by group; or a number of clients' together, who have so
    many examples.
    """
    if Collect.EVERY in collect.values():
        raise WireError("it is asked for an upload that is not summed")
    return {
        group: examples if rule is Collect.MEAN_BY_EXAMPLES else clients
        for group, rule in collect.items()
    }


def encode(upload: Groups, weight: Mapping[str, int], members: int) -> Words:
    """Weighted numbers with 32 bits behind the point.

    What a sum over all members could not hold is refused, not cut off.
    """
    parts = [
        upload[group][name].detach().cpu().double().reshape(-1) * weight[group]
        for group, name in _places(upload, weight)
    ]
    numbers = torch.cat([torch.zeros(0, dtype=torch.float64), *parts])
    if not bool(numbers.isfinite().all()):
        raise WireError("its upload holds NaN or infinite numbers")
    most = 2.0 ** (63 - BITS) / members
    if bool((numbers.abs() >= most).any()):
        raise WireError(
            f"its upload, times its weight, goes beyond {most:,.0f}: more than a masked sum can"
            " hold"
        )
    words: Words = (numbers * 2.0**BITS).round().long().numpy().view(np.uint64)
    return words


def decode(
    words: Words, weight: Mapping[str, int], like: Groups
) -> dict[str, dict[str, torch.Tensor]]:
    """A sum as the mean of its parts.

    Whole numbers (counters) are means, too, and rounded: the largest is in no sum.
    """
    numbers = torch.from_numpy(words.view(np.int64).astype(np.float64)) / 2.0**BITS
    places = _places(like, weight)
    parts = dict(
        zip(
            places,
            torch.split(numbers, [like[group][name].numel() for group, name in places]),
            strict=True,
        )
    )

    def mean(group: str, name: str, form: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = parts[group, name].reshape(form.shape) / weight[group]
        return (found if form.is_floating_point() else found.round()).to(form.device, form.dtype)

    return {
        group: {name: mean(group, name, form) for name, form in like[group].items()}
        for group in weight
    }


def length(like: Groups) -> int:
    return sum(tensor.numel() for group in like.values() for tensor in group.values())


def _places(groups: Groups, weight: Mapping[str, int]) -> list[tuple[str, str]]:
    """Where the numbers stand, in an order that both sides know."""
    return [(group, name) for group in sorted(weight) for name in sorted(groups[group])]


def stream(seed: bytes, size: int) -> Words:
    """PRG(seed). Every seed is used for one exchange and no more, so there is nothing to count up."""
    return np.frombuffer(
        Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor().update(bytes(8 * size)), WORD
    )


def mask(client: int, own: bytes, shared: Mapping[int, bytes], size: int) -> Words:
    """What a client adds: its own mask, and one for each of the others, which the other takes off."""
    return stream(own, size) + pairwise(client, shared, size)


def pairwise(client: int, shared: Mapping[int, bytes], size: int) -> Words:
    total = np.zeros(size, np.uint64)
    for other, seed in shared.items():
        total = total + stream(seed, size) if client < other else total - stream(seed, size)
    return total


def total(uploads: Iterable[Words], masks: Iterable[Words]) -> Words:
    """The sum of uploads without their masks."""
    return reduce(np.subtract, masks, reduce(np.add, uploads))


def to_groups(words: Words) -> Groups:
    """As it travels."""
    return {"masked": {"words": torch.from_numpy(words.view(np.int64))}}


def from_groups(groups: Groups) -> Words:
    return groups["masked"]["words"].numpy().view(np.uint64)
