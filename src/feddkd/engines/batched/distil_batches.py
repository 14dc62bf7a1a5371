"""What clients teach in a round, for gradients at shared weights: the batches of all its steps,
laid out so that runs whose lessons have equal shapes can be taught in one program.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from feddkd.engines.batched.folds import Shapes, shapes, stacked
from feddkd.engines.batched.lanes import Lane, Store, Tape
from feddkd.engines.interface import Order
from feddkd.method import Batch, Collect, Exchange
from feddkd.tensors import Groups

Memo = Callable[[int, int], Groups]  # (run, client) -> memo


class DistilBatch(NamedTuple):
    """Of clients whose batches have one size, as many in each run."""

    memo: Groups  # (runs, clients, ...)
    batches: Batch  # (steps, runs, clients, ...)
    weight: Tensor  # (runs, clients): a client's part in the mean of its run


class Course(NamedTuple):
    """The lessons of a round for runs that can be taught together."""

    orders: list[int]  # which of the exchange's they are
    clients: list[list[list[int]]]  # lesson -> run -> positions in its cohort
    lessons: list[DistilBatch]
    shapes: tuple[Shapes, ...]  # of the lessons' tensors


class RunReading(NamedTuple):
    """Who reads what in one run: a lane a client with a batch for each step, and the positions that
    make a lesson together.
    """

    order: int
    lanes: list[Lane]
    weights: list[float]
    groups: list[list[int]]

    @property
    def shape(self) -> tuple[tuple[int, int], ...]:
        """(clients, their batch size) for each lesson: runs of the same shape go together."""
        return tuple((len(group), self.lanes[group[0]].sizes[0]) for group in self.groups)


def draw_up(
    exchange: Exchange,
    orders: Sequence[Order],
    store: Store,
    memo: Memo,
    dtype: torch.dtype,
    couples: bool,
    most: int,
) -> list[Course]:
    """Return the round's courses, of at most so many runs.

    A network that couples the examples of a batch, as batch norm does, would feel padding: there
    batches of other sizes make a lesson of their own.
    """
    families: dict[object, list[RunReading]] = {}
    for at, order in enumerate(orders):
        reading = _reading(exchange, at, order, store, couples)
        families.setdefault(reading.shape if couples else len(order.cohort), []).append(reading)
    teams = [
        family[at : at + most] for family in families.values() for at in range(0, len(family), most)
    ]
    return [_course(exchange, orders, team, store, memo, dtype) for team in teams]


def _reading(exchange: Exchange, at: int, order: Order, store: Store, couples: bool) -> RunReading:
    """The batches are those of the phase's repetitions."""
    repetitions = [
        order._replace(key=(*order.key[:-1], step)) for step in range(1, exchange.steps + 1)
    ]
    drawn, clients = store.lay_out(exchange.phase.reads, repetitions), len(order.cohort)
    lanes = [_joined(at, drawn[position::clients]) for position in range(clients)]
    sizes = [lane.sizes[0] for lane in lanes]
    alike = [[at for at, own in enumerate(sizes) if own == size] for size in sorted(set(sizes))]
    return RunReading(
        at, lanes, _weights(exchange, order, store), alike if couples else [list(range(len(lanes)))]
    )


def _joined(at: int, lanes: Sequence[Lane]) -> Lane:
    """A client's repetitions, of one batch each, as batches of one lane."""
    line, keys = (
        np.concatenate([lane.line for lane in lanes]),
        np.concatenate([lane.keys for lane in lanes]),
    )
    return Lane(at, lanes[0].client, line, [len(lane.line) for lane in lanes], keys)


def _course(
    exchange: Exchange,
    orders: Sequence[Order],
    team: list[RunReading],
    store: Store,
    memo: Memo,
    dtype: torch.dtype,
) -> Course:
    clients = [
        [reading.groups[number] for reading in team] for number in range(len(team[0].groups))
    ]
    lessons = []
    for groups in clients:
        lanes = [
            reading.lanes[at] for reading, group in zip(team, groups, strict=True) for at in group
        ]
        memos = stacked([memo(orders[lane.order].run, lane.client) for lane in lanes])
        weight = [
            reading.weights[at] for reading, group in zip(team, groups, strict=True) for at in group
        ]
        shape = len(team), len(groups[0])
        lessons.append(
            DistilBatch(
                {
                    g: {
                        name: tensor.reshape(*shape, *tensor.shape[1:])
                        for name, tensor in own.items()
                    }
                    for g, own in memos.items()
                },
                _batches(exchange, lanes, store, dtype, shape),
                torch.tensor(weight, dtype=dtype)
                .reshape(shape)
                .to(store.x.device, non_blocking=True),
            )
        )
    found = tuple(
        (*shapes(lesson.memo), *(tuple(own.shape) for own in (*lesson.batches, lesson.weight)))
        for lesson in lessons
    )
    return Course([reading.order for reading in team], clients, lessons, found)


def _batches(
    exchange: Exchange, lanes: list[Lane], store: Store, dtype: torch.dtype, shape: tuple[int, int]
) -> Batch:
    """(steps, runs, clients, ...), read at once."""
    tape = Tape.of(lanes, dtype, store.x.device)
    indices, share, keys = (
        tensor.flatten(0, 1) for tensor in (tape.indices, tape.share, tape.keys)
    )
    read = store.read(indices, share, keys, dtype, exchange.phase.reads.random)
    return Batch(*(tensor.reshape(len(tape.sizes), *shape, *tensor.shape[1:]) for tensor in read))


def _weights(exchange: Exchange, order: Order, store: Store) -> list[float]:
    federation, source = store.federations[order.run], exchange.phase.reads.source
    by_examples = Collect.MEAN_BY_EXAMPLES in exchange.phase.collect.values()
    counts = [
        len(federation.indices(source, client)) if by_examples else 1 for client in order.cohort
    ]
    return [count / sum(counts) for count in counts]
