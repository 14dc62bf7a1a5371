"""A cohort's work as lanes: one lane a client of a run, those with most batches first, so that those at work are always a
prefix."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from feddkd.data.batches import Indices, Reads, draw
from feddkd.data.federation import Federation
from feddkd.data.transforms import Transform
from feddkd.engines import Order
from feddkd.keys import step_keys
from feddkd.method import Batch

WIDTH = {torch.float32: np.float32, torch.float64: np.float64}


@dataclass(frozen=True)
class Lane:
    """One client's reading list in one exchange, as positions in the common store."""

    order: int  # which of the exchange's orders it belongs to
    client: int
    batches: list[Indices]
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
        x, y = ((f.x for f in kept), (f.y for f in kept)) if len(kept) > 1 else ((kept[0].x,), (kept[0].y,))
        return cls(_joined(list(x)), _joined(list(y)), offset, federations)

    def lay_out(self, reads: Reads, orders: Sequence[Order]) -> list[Lane]:
        """All lanes of an exchange, longest first."""
        lanes = []
        for number, order in enumerate(orders):
            federation, start = self.federations[order.run], self.offset[order.run]
            for client in order.cohort:
                key, own = (*order.key, client), federation.indices(reads.source, client)
                own = own + start if start else own
                batches = [own[at] for at in draw(reads, len(own), key)]
                lanes.append(Lane(number, client, batches, step_keys(key, len(batches))))
        return sorted(lanes, key=lambda lane: -len(lane.batches))

    def read(self, indices: Tensor, share: Tensor, keys: Tensor, dtype: torch.dtype, random: bool) -> Batch:
        """The batches of several lanes at once, as the network sees them: (lanes, batch, ...)."""
        x, y = self.x[indices], self.y[indices]
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
    """The reading lists of some lanes, on the device: (steps, lanes, width). A short batch ends in places of share 0."""

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
        steps = len(lanes[0].batches)
        sizes = np.zeros((steps, len(lanes)), np.int64)
        for at, lane in enumerate(lanes):
            sizes[: len(lane.batches), at] = [len(batch) for batch in lane.batches]
        filled = np.arange(sizes.max()) < sizes[..., None]
        indices, keys = np.zeros(filled.shape, np.int64), np.zeros(sizes.shape, np.int64)
        for at, lane in enumerate(lanes):
            indices[:, at][filled[:, at]] = np.concatenate(lane.batches)
            keys[: len(lane.keys), at] = lane.keys
        share = filled / np.maximum(sizes, 1)[..., None]
        # not waited for: the device may still be at work on what came before
        on_host = (torch.from_numpy(each) for each in (indices, share.astype(WIDTH[dtype]), keys))
        there = [tensor.to(device, non_blocking=True) for tensor in on_host]
        return cls(there[0], there[1], there[2], sizes)
