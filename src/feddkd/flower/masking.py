"""Numbers as integers modulo 2^64, and masks on them that cancel in a sum.

    y_k = round(2^32 n_k x_k) + PRG(b_k) + sum_{l > k} PRG(s_kl) - sum_{l < k} PRG(s_kl)  (mod 2^64)

Bonawitz et al., "Practical secure aggregation for privacy-preserving machine learning", CCS 2017,
doi:10.1145/3133956.3133982. Two clients share s_kl, and it cancels when all uploads are summed.
Only client k knows b_k; it hides an upload that arrives after the client's s_kl had to be revealed.
PRG is ChaCha20. flwr's own generator (pseudo_rand_gen) folds a seed to 32 bits, few enough to try
them all, and flwr's quantisation silently clips numbers that are out of range.
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
BITS = 32  # after the binary point: a sum of m numbers is wrong by at most m 2^-33
WORD = np.dtype("<u8")


def weights(collect: Mapping[str, Collect], examples: int, clients: int = 1) -> dict[str, int]:
    """Return the weight of each group of an upload.

    For a sum over several clients, give their number and their examples together.
    """
    if Collect.EVERY in collect.values():
        raise WireError("the server asks for a masked upload that is not summed")
    return {
        group: examples if rule is Collect.MEAN_BY_EXAMPLES else clients
        for group, rule in collect.items()
    }


def encode(upload: Groups, weight: Mapping[str, int], members: int) -> Words:
    """Return the weighted numbers of an upload with 32 bits after the binary point.

    Raise WireError if a sum over all members might overflow; nothing is clipped.
    """
    parts = [
        upload[group][name].detach().cpu().double().reshape(-1) * weight[group]
        for group, name in _names(upload, weight)
    ]
    numbers = torch.cat([torch.zeros(0, dtype=torch.float64), *parts])
    if not bool(numbers.isfinite().all()):
        raise WireError("the upload holds NaN or infinite numbers")
    most = 2.0 ** (63 - BITS) / members
    if bool((numbers.abs() >= most).any()):
        raise WireError(
            f"the upload times its weight exceeds {most:,.0f}, the most that a masked sum can hold"
        )
    words: Words = (numbers * 2.0**BITS).round().long().numpy().view(np.uint64)
    return words


def decode(
    words: Words, weight: Mapping[str, int], like: Groups
) -> dict[str, dict[str, torch.Tensor]]:
    """Return a sum as the mean of its parts, in the shapes and types of `like`.

    Integers (counters) become rounded means: a sum does not hold the largest one.
    """
    numbers = torch.from_numpy(words.view(np.int64).astype(np.float64)) / 2.0**BITS
    names = _names(like, weight)
    parts = torch.split(numbers, [like[group][name].numel() for group, name in names])
    flat = dict(zip(names, parts, strict=True))

    def mean(group: str, name: str, form: torch.Tensor) -> torch.Tensor:
        tensor: torch.Tensor = flat[group, name].reshape(form.shape) / weight[group]
        return (tensor if form.is_floating_point() else tensor.round()).to(form.device, form.dtype)

    return {
        group: {name: mean(group, name, form) for name, form in like[group].items()}
        for group in weight
    }


def length(like: Groups) -> int:
    """Return how many numbers the groups hold."""
    return sum(tensor.numel() for group in like.values() for tensor in group.values())


def _names(groups: Groups, weight: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return (group, tensor) names in the order in which both sides lay out the numbers."""
    return [(group, name) for group in sorted(weight) for name in sorted(groups[group])]


def stream(seed: bytes, size: int) -> Words:
    """Return PRG(seed). Every seed is used for one exchange only, so the nonce is constant."""
    return np.frombuffer(
        Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor().update(bytes(8 * size)), WORD
    )


def mask(client: int, own: bytes, shared: Mapping[int, bytes], size: int) -> Words:
    """Return the mask of a client: its own, and one for each peer, which that peer subtracts."""
    return stream(own, size) + pairwise(client, shared, size)


def pairwise(client: int, shared: Mapping[int, bytes], size: int) -> Words:
    """Return the sum of the masks that a client shares with its peers, each with its sign."""
    total = np.zeros(size, np.uint64)
    for other, seed in shared.items():
        total = total + stream(seed, size) if client < other else total - stream(seed, size)
    return total


def total(uploads: Iterable[Words], masks: Iterable[Words]) -> Words:
    """Return the sum of the uploads without these masks."""
    return reduce(np.subtract, masks, reduce(np.add, uploads))


def to_groups(words: Words) -> Groups:
    """Return masked numbers as groups of tensors."""
    return {"masked": {"words": torch.from_numpy(words.view(np.int64))}}


def from_groups(groups: Groups) -> Words:
    """Return the masked numbers in groups of tensors."""
    return groups["masked"]["words"].numpy().view(np.uint64)
