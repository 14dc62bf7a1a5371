"""The work of a cohort as lanes: one lane for each client of each run.

Lanes with most batches come first, so that the active lanes are always the first ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from feddkd.data.batches import Indices, Reads, line_up
from feddkd.data.federation import Federation
from feddkd.data.transforms import Transform
from feddkd.engines.interface import Order
from feddkd.method import Batch
from feddkd.randomness import Key, many_step_keys
from feddkd.trees import Tree, cat, first_tensor, map_tensors, tensors_of

NUMPY_TYPES = {torch.float32: np.float32, torch.float64: np.float64}


class Lane(NamedTuple):
    """The batches that one client reads in one exchange."""

    order: int  # the number of its order in the exchange
    client: int
    indices: Indices  # of its examples in the store, batch after batch
    sizes: list[int]  # of the batches
    keys: Indices  # one number for each batch


@dataclass(frozen=True)
class Store:
    """The examples of all runs on the device, each dataset once.

    `offset` holds the position where the examples of a run begin.
    """

    x: Tree
    y: Tree
    offset: dict[int, int]
    federations: Sequence[Federation]

    @property
    def transform(self) -> Transform:
        return self.federations[0].transform

    @property
    def device(self) -> torch.device:
        return first_tensor(self.x).device

    @property
    def numbers(self) -> int:
        """The number of numbers in the input of one example."""
        return sum(tensor[0].numel() for tensor in tensors_of(self.x))

    @classmethod
    def of(cls, federations: Sequence[Federation]) -> "Store":
        """Return a store in which runs that read the same tensors share them."""
        starts: dict[Any, int] = {}  # addresses of a dataset -> its start in the store
        distinct: list[Federation] = []
        offset, end = {}, 0
        for run, federation in enumerate(federations):
            tensors = tensors_of((federation.x, federation.y))
            address = tuple(tensor.data_ptr() for tensor in tensors)
            if address not in starts:
                starts[address], end = end, end + len(tensors[0])
                distinct.append(federation)
            offset[run] = starts[address]
        x, y = _joined([(federation.x, federation.y) for federation in distinct])
        return cls(x, y, offset, federations)

    def lanes_of(self, reads: Reads, orders: Sequence[Order]) -> list[Lane]:
        """Return all lanes of an exchange, those with most batches first."""
        clients = [
            (number, client) for number, order in enumerate(orders) for client in order.cohort
        ]
        paths = [(*orders[number].key, client) for number, client in clients]
        drawn = [
            self._batches(reads, orders[number].run, client, key)
            for (number, client), key in zip(clients, paths, strict=True)
        ]
        keys = many_step_keys(paths, max((len(sizes) for _, sizes in drawn), default=0))
        lanes = [
            Lane(number, client, indices, sizes, row[: len(sizes)])
            for (number, client), (indices, sizes), row in zip(clients, drawn, keys, strict=True)
        ]
        return sorted(lanes, key=lambda lane: -len(lane.sizes))

    def _batches(self, reads: Reads, run: int, client: int, key: Key) -> tuple[Indices, list[int]]:
        """Return (indices in the store, sizes of the batches) for one client."""
        indices, start = self.federations[run].indices(reads.source, client), self.offset[run]
        positions, sizes = line_up(reads, len(indices), key)
        return indices[positions] + start if start else indices[positions], sizes

    def read(
        self, indices: Tensor, share: Tensor, keys: Tensor, dtype: torch.dtype, random: bool
    ) -> Batch:
        """Return the batches of several lanes as the network sees them: (lanes, batch, ...)."""

        def chosen(tensor: Tensor) -> Tensor:
            # index_select: on a CPU many times as fast as x[indices]
            return tensor.index_select(0, indices.flatten())

        def by_lane(tensor: Tensor) -> Tensor:
            return tensor.reshape(*indices.shape, *tensor.shape[1:])

        flat, y = map_tensors(chosen, self.x), map_tensors(lambda t: by_lane(chosen(t)), self.y)
        if random and self.transform.random:
            x = map_tensors(by_lane, flat)
            inputs = vmap(lambda images, key: self.transform(images, dtype, key))(x, keys)
        else:
            inputs = map_tensors(by_lane, self.transform(flat, dtype))
        return Batch(inputs, y, share, keys)


def _joined(trees: list[Tree]) -> Tree:
    return trees[0] if len(trees) == 1 else cat(trees)


@dataclass(frozen=True)
class BatchTable:
    """The batches of some lanes, on the device: (steps, lanes, width).

    A batch smaller than the width ends in entries of share 0.
    """

    indices: Tensor
    share: Tensor
    keys: Tensor  # (steps, lanes)
    sizes: Indices  # (steps, lanes), on the host; 0 once a lane has finished

    @cached_property
    def active(self) -> list[int]:
        """The number of active lanes in each step."""
        return [int(count) for count in (self.sizes > 0).sum(1)]

    def after(self, steps: int) -> "BatchTable":
        """Return the table without its first steps."""
        rows = slice(steps, None)
        return BatchTable(self.indices[rows], self.share[rows], self.keys[rows], self.sizes[rows])

    @classmethod
    def of(cls, lanes: Sequence[Lane], dtype: torch.dtype, device: torch.device) -> "BatchTable":
        """Return the table of some lanes, made on the host and copied in one piece."""
        sizes = np.zeros((len(lanes), len(lanes[0].sizes)), np.int64)
        keys = np.zeros(sizes.shape, np.int64)
        for row, lane in enumerate(lanes):
            sizes[row, : len(lane.sizes)], keys[row, : len(lane.sizes)] = lane.sizes, lane.keys
        filled = np.arange(sizes.max()) < sizes[..., None]
        indices = np.zeros(filled.shape, np.int64)
        indices[filled] = np.concatenate([lane.indices for lane in lanes])
        share = filled * (1 / np.maximum(sizes, 1)).astype(NUMPY_TYPES[dtype])[..., None]

        def by_step(array: "np.typing.NDArray[np.generic]") -> Tensor:
            # non_blocking: the device may still compute what came before
            host = torch.from_numpy(np.ascontiguousarray(array.swapaxes(0, 1)))
            return host.to(device, non_blocking=True)

        return cls(by_step(indices), by_step(share), by_step(keys), sizes.T)
