"""A cohort's work as lanes: one lane a client of a run, those with most batches first, so that
those at work are always a prefix.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

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

WIDTH = {torch.float32: np.float32, torch.float64: np.float64}


class Lane(NamedTuple):
    """One client's reading list in one exchange."""

    order: int  # which of the exchange's orders it belongs to
    client: int
    line: Indices  # positions in the common store, batch after batch
    sizes: list[int]  # of the batches
    keys: Indices  # one number for each batch


@dataclass(frozen=True)
class Store:
    """The examples of all runs on the device, each set once; `offset` says where a run's begin."""

    x: Tensor
    y: Tensor
    offset: dict[int, int]
    federations: Sequence[Federation]

    @property
    def transform(self) -> Transform:
        return self.federations[0].transform

    @classmethod
    def of(cls, federations: Sequence[Federation]) -> "Store":
        """Runs that read the same tensors share them."""
        starts: dict[int, int] = {}
        kept: list[Federation] = []
        offset, end = {}, 0
        for run, federation in enumerate(federations):
            place = federation.x.data_ptr()
            if place not in starts:
                starts[place], end = end, end + len(federation.y)
                kept.append(federation)
            offset[run] = starts[place]
        x, y = (
            ((f.x for f in kept), (f.y for f in kept))
            if len(kept) > 1
            else ((kept[0].x,), (kept[0].y,))
        )
        return cls(_joined(list(x)), _joined(list(y)), offset, federations)

    def lay_out(self, reads: Reads, orders: Sequence[Order]) -> list[Lane]:
        """All lanes of an exchange, longest first."""
        asked = [
            (number, client, (*order.key, client))
            for number, order in enumerate(orders)
            for client in order.cohort
        ]
        lists = [
            self._reading_list(reads, orders[number].run, client, key)
            for number, client, key in asked
        ]
        keys = many_step_keys(
            [key for *_, key in asked], max((len(sizes) for _, sizes in lists), default=0)
        )
        together = zip(asked, lists, keys, strict=True)
        lanes = [
            Lane(number, client, line, sizes, own[: len(sizes)])
            for (number, client, _), (line, sizes), own in together
        ]
        return sorted(lanes, key=lambda lane: -len(lane.sizes))

    def _reading_list(
        self, reads: Reads, run: int, client: int, key: Key
    ) -> tuple[Indices, list[int]]:
        own, start = self.federations[run].indices(reads.source, client), self.offset[run]
        line, sizes = line_up(reads, len(own), key)
        return own[line] + start if start else own[line], sizes

    def read(
        self, indices: Tensor, share: Tensor, keys: Tensor, dtype: torch.dtype, random: bool
    ) -> Batch:
        """The batches of several lanes at once, as the network sees them: (lanes, batch, ...)."""
        # index_select: on a CPU many times as fast as x[indices]
        x, y = (
            tensor.index_select(0, indices.flatten()).reshape(*indices.shape, *tensor.shape[1:])
            for tensor in (self.x, self.y)
        )
        if random and self.transform.random:
            seen = vmap(lambda images, key: self.transform(images, dtype, key))(x, keys)
        else:
            flat = self.transform(x.flatten(0, 1), dtype)
            seen = flat.reshape(*indices.shape, *flat.shape[1:])
        return Batch(seen, y, share, keys)


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


@dataclass(frozen=True)
class Tape:
    """The reading lists of some lanes, on the device: (steps, lanes, width). A short batch ends in
    places of share 0.
    """

    indices: Tensor
    share: Tensor
    keys: Tensor  # (steps, lanes)
    sizes: Indices  # (steps, lanes), on the host; 0 once a lane has finished

    @cached_property
    def active(self) -> list[int]:
        """Step -> how many lanes are still at work."""
        return [int(count) for count in (self.sizes > 0).sum(1)]

    @classmethod
    def of(cls, lanes: Sequence[Lane], dtype: torch.dtype, device: torch.device) -> "Tape":
        """Written on the host, copied over at once."""
        sizes = np.zeros((len(lanes), len(lanes[0].sizes)), np.int64)
        keys = np.zeros(sizes.shape, np.int64)
        for at, lane in enumerate(lanes):
            sizes[at, : len(lane.sizes)], keys[at, : len(lane.sizes)] = lane.sizes, lane.keys
        filled = np.arange(sizes.max()) < sizes[..., None]
        indices = np.zeros(filled.shape, np.int64)
        indices[filled] = np.concatenate([lane.line for lane in lanes])
        share = filled * (1 / np.maximum(sizes, 1)).astype(WIDTH[dtype])[..., None]
        # not waited for: the device may still be at work on what came before
        by_step = (np.ascontiguousarray(each.swapaxes(0, 1)) for each in (indices, share, keys))
        there = [torch.from_numpy(each).to(device, non_blocking=True) for each in by_step]
        return cls(there[0], there[1], there[2], sizes.T)
