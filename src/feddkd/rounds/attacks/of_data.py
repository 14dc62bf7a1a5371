"""Attacks on data: malicious clients train on other labels or other images.

label_flip: Fang, Cao, Jia, Gong, "Local model poisoning attacks to Byzantine-robust federated
learning", USENIX Security 2020, arXiv:1911.11815:   y <- classes - 1 - y
backdoor: Gu, Dolan-Gavitt, Garg, "BadNets: identifying vulnerabilities in the machine learning
model supply chain", 2017, arXiv:1708.06733:   a bright patch in a corner,   y <- target
"""

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from feddkd.data.batches import Indices
from feddkd.data.federation import Federation
from feddkd.data.index_lists import IndexLists
from feddkd.errors import InputError
from feddkd.randomness import Key, generator
from feddkd.rounds.attacks.rule import ATTACKS, Attack, Malicious
from feddkd.spec.types import Count, Share, Whole


@ATTACKS.register
def label_flip(who: Malicious) -> Attack:
    """Malicious clients train on the labels classes - 1 - y."""

    def data(federation: Federation, malicious: list[int], key: Key) -> Federation:
        at = _held(federation, malicious)
        labels = federation.classes - 1 - federation.y[at]
        return _with_other_examples(federation, malicious, federation.x[at], labels)

    return Attack(who, data)


@ATTACKS.register
def backdoor(
    who: Malicious, *, target: Whole = 0, size: Count = 3, poisoned: Share = 0.5
) -> Attack:
    """Malicious clients train a share of their examples with a patch and the label `target`. The
    patch is a square in the lower right corner (the last entries of a vector), as bright as
    possible. Rows have its success rate: how many patched test examples of other classes get it.
    """
    return Attack(
        who,
        partial(_poisoned, target=target, size=size, share=poisoned),
        aim=partial(_triggered, target=target, size=size),
    )


def _poisoned(
    federation: Federation,
    malicious: list[int],
    key: Key,
    *,
    target: int,
    size: int,
    share: float,
) -> Federation:
    """Return the federation with a patch on a share of the examples of each malicious client."""
    _check(federation, target, size)
    at = _held(federation, malicious)
    x, y, start = federation.x[at].clone(), federation.y[at].clone(), 0
    for client in malicious:
        examples = len(federation.train[client])
        drawn = generator((*key, client)).permutation(examples)
        chosen = torch.from_numpy(start + np.sort(drawn[: round(share * examples)]))
        x[chosen] = patched(x[chosen], size, federation.transform.scale)
        y[chosen] = target
        start += examples
    return _with_other_examples(federation, malicious, x, y)


def _triggered(federation: Federation, *, target: int, size: int) -> Federation:
    """Return the federation with the patched test examples of other classes as its test set; their
    labels are the target.
    """
    _check(federation, target, size)
    test = torch.from_numpy(federation.test)
    at = test[federation.y[test].cpu() != target]
    x = patched(federation.x[at], size, federation.transform.scale)
    count = len(federation.x)
    return replace(
        federation,
        x=torch.cat([federation.x, x]),
        y=torch.cat([federation.y, torch.full_like(federation.y[at], target)]),
        test=np.arange(count, count + len(at)),
        own_test=None,
    )


def patched(x: Tensor, size: int, value: float) -> Tensor:
    """Return examples with a patch of this size and value."""
    x = x.clone()
    if x.dim() > 2:
        x[..., -size:, -size:] = value
    else:
        x[..., -size:] = value
    return x


def _check(federation: Federation, target: int, size: int) -> None:
    x = federation.x
    if not isinstance(x, Tensor) or x.dim() < 2 or x.dtype == torch.int64:
        raise InputError("attack 'backdoor' needs examples that are images or vectors")
    if size > min(x.shape[-2:] if x.dim() > 2 else x.shape[-1:]):
        raise InputError(
            f"attack 'backdoor': a patch of size {size} does not fit into examples of shape"
            f" {tuple(x.shape[1:])}"
        )
    if target >= federation.classes:
        raise InputError(
            f"attack 'backdoor': there is no class {target}; classes have numbers from 0 to"
            f" {federation.classes - 1}"
        )


def _held(federation: Federation, clients: list[int]) -> Tensor:
    """Return the positions of the training examples of some clients, client after client."""
    lists = [np.arange(0), *(federation.train[client] for client in clients)]
    return torch.from_numpy(np.concatenate(lists))


def _with_other_examples(
    federation: Federation, clients: list[int], x: Tensor, y: Tensor
) -> Federation:
    """Return the federation in which some clients read these examples in place of theirs.

    They are added to the store, since other clients may hold the same examples.
    """
    lists, start = IndexLists.of(federation.train), len(federation.y)
    values: Indices = lists.values.copy()
    for client in clients:
        begin, end = lists.offsets[client : client + 2]
        values[begin:end] = np.arange(start, start + end - begin)
        start += end - begin
    return replace(
        federation,
        x=torch.cat([federation.x, x]),
        y=torch.cat([federation.y, y]),
        train=lists.replaced(values),
    )
