"""The batches of a distillation round, for gradients at shared weights.

The batches of all steps are laid out so that runs with equal shapes are computed by one program.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from feddkd.engines.batched.folds import Shapes, shapes, stacked_memos
from feddkd.engines.batched.lanes import BatchTable, Lane, Store
from feddkd.engines.client import client_weights
from feddkd.engines.interface import Order
from feddkd.method import Batch, Collect, Exchange
from feddkd.tensors import Groups

MemoOf = Callable[[int, int], Groups]  # (run, client) -> memo


class DistilBlock(NamedTuple):
    """Clients whose batches have one size, equally many in each run."""

    memo: Groups  # (runs, clients, ...)
    batches: Batch  # (steps, runs, clients, ...)
    weight: Tensor  # (runs, clients): a client's weight in the mean of its run


class DistilRound(NamedTuple):
    """The blocks of a round, for runs that are computed together."""

    orders: list[int]  # the numbers of the runs' orders in the exchange
    clients: list[list[list[int]]]  # block -> run -> positions in the cohort of the run
    blocks: list[DistilBlock]
    shapes: tuple[Shapes, ...]  # of the tensors in the blocks


class LanesOfRun(NamedTuple):
    """The lanes of one run: one for each client, with one batch for each step."""

    order: int
    lanes: list[Lane]
    weights: list[float]
    groups: list[list[int]]  # positions of the clients of each block

    @property
    def shape(self) -> tuple[tuple[int, int], ...]:
        """(clients, their batch size) of each block: runs of equal shape are computed together."""
        return tuple((len(group), self.lanes[group[0]].sizes[0]) for group in self.groups)


def distil_rounds(
    exchange: Exchange,
    orders: Sequence[Order],
    store: Store,
    memo_of: MemoOf,
    dtype: torch.dtype,
    couples: bool,
    most: int,
) -> list[DistilRound]:
    """Return the batches of a round, for at most `most` runs at a time.

    If the network couples the examples of a batch (as batch norm does), padding would change its
    results: then batches of different sizes are in different blocks.
    """
    by_shape: dict[object, list[LanesOfRun]] = {}
    for number, order in enumerate(orders):
        run = _run_lanes(exchange, number, order, store, couples)
        by_shape.setdefault(run.shape if couples else len(order.cohort), []).append(run)
    rounds = []
    for runs in by_shape.values():
        for start in range(0, len(runs), most):
            together = runs[start : start + most]
            rounds.append(_distil_round(exchange, orders, together, store, memo_of, dtype))
    return rounds


def _run_lanes(
    exchange: Exchange, number: int, order: Order, store: Store, couples: bool
) -> LanesOfRun:
    """Return the lanes of one run; a lane has the batches of all repetitions of the phase."""
    steps = range(1, exchange.steps + 1)
    repetitions = [order._replace(key=(*order.key[:-1], step)) for step in steps]
    drawn, clients = store.lanes_of(exchange.phase.reads, repetitions), len(order.cohort)
    lanes = [_one_lane(number, drawn[position::clients]) for position in range(clients)]
    by_size: dict[int, list[int]] = {}
    for position, lane in enumerate(lanes):
        by_size.setdefault(lane.sizes[0] if couples else 0, []).append(position)
    groups = [by_size[size] for size in sorted(by_size)]
    return LanesOfRun(number, lanes, _weights(exchange, order, store), groups)


def _one_lane(number: int, lanes: Sequence[Lane]) -> Lane:
    """Return the repetitions of a client, of one batch each, as the batches of one lane."""
    indices = np.concatenate([lane.indices for lane in lanes])
    keys = np.concatenate([lane.keys for lane in lanes])
    return Lane(number, lanes[0].client, indices, [len(lane.indices) for lane in lanes], keys)


def _distil_round(
    exchange: Exchange,
    orders: Sequence[Order],
    runs: list[LanesOfRun],
    store: Store,
    memo_of: MemoOf,
    dtype: torch.dtype,
) -> DistilRound:
    clients = [[run.groups[number] for run in runs] for number in range(len(runs[0].groups))]
    blocks = []
    for groups in clients:
        lanes, weights = [], []
        for run, group in zip(runs, groups, strict=True):
            lanes += [run.lanes[position] for position in group]
            weights += [run.weights[position] for position in group]
        shape = len(runs), len(groups[0])
        memos = stacked_memos([memo_of(orders[lane.order].run, lane.client) for lane in lanes])
        memo = {
            group: {name: t.reshape(*shape, *t.shape[1:]) for name, t in tensors.items()}
            for group, tensors in memos.items()
        }
        batches = _batches(exchange, lanes, store, dtype, shape)
        weight = torch.tensor(weights, dtype=dtype).reshape(shape)
        blocks.append(DistilBlock(memo, batches, weight.to(store.device, non_blocking=True)))
    block_shapes = tuple(
        (*shapes(block.memo), *(tuple(t.shape) for t in (*block.batches.tensors, block.weight)))
        for block in blocks
    )
    return DistilRound([run.order for run in runs], clients, blocks, block_shapes)


def _batches(
    exchange: Exchange, lanes: list[Lane], store: Store, dtype: torch.dtype, shape: tuple[int, int]
) -> Batch:
    """Return the batches of all steps, read at once: (steps, runs, clients, ...)."""
    table = BatchTable.of(lanes, dtype, store.device)
    indices, share, keys = (t.flatten(0, 1) for t in (table.indices, table.share, table.keys))
    read = store.read(indices, share, keys, dtype, exchange.phase.reads.random)
    return read.mapped(lambda t: t.reshape(len(table.sizes), *shape, *t.shape[1:]))


def _weights(exchange: Exchange, order: Order, store: Store) -> list[float]:
    counts = [1] * len(order.cohort)
    if Collect.MEAN_BY_EXAMPLES in exchange.phase.collect.values():
        counts = client_weights(store.federations[order.run], exchange.phase, order.cohort)
    return [count / sum(counts) for count in counts]
