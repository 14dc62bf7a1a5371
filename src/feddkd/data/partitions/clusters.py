"""Clusters of similar examples: k-means on a random projection, the same on every machine.

All numbers of the computation are whole, so the order of a sum cannot change them: examples are
scaled to whole numbers, the projection adds and subtracts them, and centres are rounded.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from feddkd.data.batches import Indices
from feddkd.data.examples import Data
from feddkd.errors import InputError
from feddkd.randomness import Key, generator

# (examples, number of clients, key) -> the domain of each example
FindDomains = Callable[[npt.NDArray[Any], int, Key], Indices]
Points = npt.NDArray[np.float64]
LARGEST = 32_767  # the largest number of a scaled example; products of two then stay exact
ROUNDS = 100  # rounds of k-means at most
CHUNK = 4_096  # examples that are projected at once


def find_clusters(x: npt.NDArray[Any], count: int, dimensions: int, key: Key) -> Indices:
    """Return the number of each example's cluster, from 0 to `count` - 1; none is empty."""
    points = project(x, dimensions, key)
    if count > len(np.unique(points, axis=0)):
        raise InputError(
            f"partition 'clusters' cannot find {count} clusters: there are fewer different examples"
        )
    centres = _first_centres(points, count, generator((*key, "clusters")))
    for _ in range(ROUNDS):
        nearest = _nearest(points, centres)
        moved = _means(points, nearest, count)
        if np.array_equal(moved, centres):
            break
        centres = moved
    return nearest


def with_domains(data: Data, read: Indices, find: FindDomains, clients: int, key: Key) -> Data:
    """Return the data with domains that are found among the examples that are read.

    The other training examples have the domain -1, so a packed copy, which lacks them, gives the
    same domains.
    """
    x = torch.cat([data.train.x[torch.from_numpy(read)], data.test.x])
    if x.dtype == torch.int64:
        raise InputError("the partition finds domains of pixels or real numbers, not of tokens")
    found = torch.from_numpy(find(x.numpy(), clients, key))
    domain = torch.full((len(data.train),), -1)
    domain[torch.from_numpy(read)] = found[: len(read)]
    train = replace(data.train, domain=domain)
    return replace(data, train=train, test=replace(data.test, domain=found[len(read) :]))


def project(x: npt.NDArray[Any], dimensions: int, key: Key) -> Points:
    """Return the examples in few dimensions: random signed sums of their numbers, rounded.

    Distances keep their ratios up to a few per cent (Achlioptas, 2003).
    """
    flat = x.reshape(len(x), -1)
    signs = generator((*key, "projection")).integers(0, 2, (flat.shape[1], dimensions)) * 2.0 - 1
    largest = float(np.abs(flat).max()) or 1.0
    scale = 1.0 if flat.dtype == np.uint8 else LARGEST / largest
    parts = [
        np.rint(flat[at : at + CHUNK].astype(np.float64) * scale) @ signs
        for at in range(0, len(flat), CHUNK)
    ]
    return np.asarray(np.rint(np.concatenate(parts) / np.sqrt(flat.shape[1])))


def _first_centres(points: Points, count: int, random: np.random.Generator) -> Points:
    """Return examples that are far apart, by the rule of k-means++."""
    chosen = [int(random.integers(len(points)))]
    distance = np.full(len(points), np.inf)
    for _ in range(count - 1):
        distance = np.minimum(distance, ((points - points[chosen[-1]]) ** 2).sum(axis=1))
        sums = np.cumsum(distance)
        far = np.searchsorted(sums, random.random() * sums[-1], side="right")
        chosen.append(min(int(far), len(points) - 1))
    return points[chosen]


def _nearest(points: Points, centres: Points) -> Indices:
    """Return the nearest centre of each point; a centre without points takes the farthest one."""
    distance = (centres**2).sum(axis=1) - 2 * points @ centres.T
    nearest = distance.argmin(axis=1)
    own = distance.min(axis=1) + (points**2).sum(axis=1)
    for centre in np.setdiff1d(np.arange(len(centres)), nearest):
        shared = np.bincount(nearest, minlength=len(centres))[nearest] > 1
        nearest[np.where(shared, own, -1.0).argmax()] = centre
    return np.asarray(nearest)


def _means(points: Points, nearest: Indices, count: int) -> Points:
    sums = np.zeros((count, points.shape[1]))
    np.add.at(sums, nearest, points)
    return np.rint(sums / np.bincount(nearest, minlength=count)[:, None])
