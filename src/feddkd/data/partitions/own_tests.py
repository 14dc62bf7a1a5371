"""Own tests: test and validation examples for each client that are like its training examples."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from feddkd.data.batches import Indices
from feddkd.data.examples import Data, Examples
from feddkd.data.index_lists import IndexLists
from feddkd.data.partitions.split import Split
from feddkd.errors import InputError
from feddkd.randomness import Key, generator


def with_own_tests(
    data: Data, split: Split, validation: Indices, key: Key, by_domain: bool
) -> Split:
    """Return the split with test and validation lists of each client, disjoint between clients.

    Lists that the split has already are kept. A client's examples have its training examples'
    shares of labels, and of domains if the data have any; with `by_domain` of domains alone.
    """
    train, kinds = IndexLists.of(split.train), _kinds(data.train, data.classes, by_domain)
    if not len(train.values):
        raise InputError(
            'client_tests = "own" divides the test set of the data, but with this partition clients'
            " bring their own examples and tests"
        )
    if split.test is None:
        tests = _kinds(data.test, data.classes, by_domain)
        dealt = deal(np.arange(len(tests)), tests, train, kinds, key, "test")
        split = replace(split, test=dealt)
    if split.validation is None and len(validation):
        dealt = deal(validation, kinds[validation], train, kinds, key, "validation")
        split = replace(split, validation=dealt)
    return split


def _kinds(part: Examples, classes: int, by_domain: bool) -> Indices:
    """Return one number for the label and domain of each example."""
    domains = np.zeros(len(part), np.int64) if part.domain is None else part.domain.numpy()
    if by_domain or not classes or part.y.ndim != 1:
        return np.asarray(domains)
    return np.asarray(domains * classes + part.y.numpy())


class Shares(NamedTuple):
    """The clients' training examples of each kind, sorted by kind."""

    kind: Indices
    client: Indices
    examples: Indices


def deal(
    pool: Indices,
    pool_kinds: Indices,
    train: IndexLists,
    kinds: Indices,
    key: Key,
    part: str,
) -> IndexLists:
    """Return for each client its part of a pool of examples.

    The examples of a kind are divided in proportion to the clients' training examples of that kind,
    to within one. Then a client without any gets one of a kind that it holds, from the client with
    the most. Examples of kinds that no client holds are left out.
    """
    random = generator(("own", part, *key))
    shares = _shares(train, kinds, random)
    known = np.isin(pool_kinds, shares.kind)
    order = random.permutation(np.flatnonzero(known))
    order = order[np.argsort(pool_kinds[order], kind="stable")]
    owners = np.repeat(shares.client, _portions(shares, pool_kinds[order]))
    _fill(owners, pool_kinds[order], shares, len(train), part)
    stored = np.argsort(pool[order])
    return IndexLists.grouped(pool[order][stored], owners[stored], len(train))


def _shares(train: IndexLists, kinds: Indices, random: np.random.Generator) -> Shares:
    """Return the clients' numbers of examples by kind, the clients of a kind in random order."""
    codes = kinds[train.values] * len(train) + train.owners
    codes, examples = np.unique(codes, return_counts=True)
    kind, client = np.divmod(codes, len(train))
    order = np.lexsort((random.random(len(kind)), kind))
    return Shares(kind[order], client[order], examples[order])


def _portions(shares: Shares, pool_kinds: Indices) -> Indices:
    """Return how many examples of the pool go to each share; those of a kind add up to it."""
    names, first, group = np.unique(shares.kind, return_index=True, return_inverse=True)
    sizes = np.bincount(np.searchsorted(names, pool_kinds), minlength=len(names))
    sums = np.cumsum(shares.examples)
    before = sums[first] - shares.examples[first]
    totals = np.add.reduceat(shares.examples, first)
    edges = (sums - before[group]) * sizes[group] // totals[group]
    starts = np.concatenate([[0], edges[:-1]])
    starts[first] = 0
    return np.asarray(edges - starts)


def _fill(owners: Indices, pool_kinds: Indices, shares: Shares, clients: int, part: str) -> None:
    """Give each client without examples one of a kind that it holds, in place."""
    held = np.bincount(owners, minlength=clients)
    empty = np.flatnonzero(held == 0)
    if not len(empty):
        return
    order = np.lexsort((-shares.examples, shares.client))
    bounds = np.searchsorted(shares.client[order], np.arange(clients + 1))
    for client in empty.tolist():
        for kind in shares.kind[order[bounds[client] : bounds[client + 1]]]:
            start, stop = np.searchsorted(pool_kinds, [kind, kind + 1])
            donors = held[owners[start:stop]]
            if len(donors) and donors.max() > 1:
                taken = start + donors.argmax()
                held[owners[taken]] -= 1
                owners[taken], held[client] = client, 1
                break
        else:
            raise InputError(_too_few(client, clients, len(owners), part))


def _too_few(client: int, clients: int, count: int, part: str) -> str:
    advice = "take fewer clients"
    if part == "validation":
        advice += ', or raise "validation", or set it to 0'
    return (
        f'client_tests = "own": {count} {part} examples leave client {client} of {clients} without'
        f" one like its training examples: {advice}"
    )
