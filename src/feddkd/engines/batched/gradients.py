"""Gradients at shared weights, of several runs at once: one backward pass of the mean of the
clients' losses, after one pass in which all teachers answer for all steps of the round.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from feddkd.engines.batched.distil_batches import Course, Memo, draw_up
from feddkd.engines.batched.distil_programs import Programme, RecordedCourse, looped, programme
from feddkd.engines.batched.folds import Shapes, shapes, stacked, take
from feddkd.engines.batched.lanes import Store
from feddkd.engines.batched.memory import ran_out
from feddkd.engines.batched.strategies import WAYS, Chooser
from feddkd.engines.client import gather
from feddkd.engines.compile.simplify import trimmed
from feddkd.engines.compile.trace import compiled
from feddkd.engines.interface import Order
from feddkd.method import Collect, Exchange, Gradient
from feddkd.models.functional import Model
from feddkd.tensors import Groups, Tensors

log = logging.getLogger(__name__)
# courses of different shapes that are kept recorded; more would be many shapes that seldom come
# again
DESKS = 8


class Kind(NamedTuple):
    """What a programme was made for."""

    strategy: str
    client: Gradient
    mean: bool
    shapes: tuple[Shapes, ...]


class Gradients:
    """Answers exchanges whose clients differentiate at shared weights, run by run as many at once
    as have equal shapes.
    """

    def __init__(self, model: Model, store: Store, dtype: torch.dtype, chooser: Chooser) -> None:
        self.model, self.store, self.dtype, self.chooser = model, store, dtype, chooser
        self.most = 1 << 30  # runs at once
        self._begun: object = None  # which orders the courses are for
        self._courses: list[Course] = []
        # the teachers' answers, where they are not at a desk
        self._said: dict[object, list[Tensor]] = {}
        self._desks: dict[Kind, RecordedCourse] = {}
        self._traces: dict[Kind, Programme] = {}

    def clear(self) -> None:
        self._forget()
        self._desks.clear()
        self._traces.clear()

    def _forget(self) -> None:
        self._begun, self._courses = None, []
        self._said.clear()
        for desk in self._desks.values():
            desk.course = None  # its own places keep all that is needed

    def __call__(
        self, exchange: Exchange, client: Gradient, orders: Sequence[Order], memo: Memo
    ) -> list[Groups]:
        """What each order gathers."""
        try:
            return self._gather(exchange, client, orders, memo)
        except RuntimeError as error:
            if min(self.most, len(orders)) == 1 or not ran_out(error):
                raise
        self.most = (min(self.most, len(orders)) + 1) // 2
        self.clear()
        self.chooser.close()
        torch.cuda.empty_cache()
        log.warning(
            "%s: %d runs do not fit in memory; going on with %d at once",
            exchange.phase.name,
            len(orders),
            self.most,
        )
        return self(exchange, client, orders, memo)

    def _gather(
        self, exchange: Exchange, client: Gradient, orders: Sequence[Order], memo: Memo
    ) -> list[Groups]:
        now = client, exchange.index, [(order.run, order.cohort) for order in orders]
        # somebody may have fallen silent since the first step
        if exchange.step == 1 or now != self._begun:
            self._forget()
            self._courses = draw_up(
                exchange, orders, self.store, memo, self.dtype, self.model.couples, self.most
            )
            self._begun = now
        found: dict[int, Groups] = {}
        for course in self._courses:
            slopes = self._slopes(
                exchange, client, course, [orders[at].sent for at in course.orders]
            )
            for run, at in enumerate(course.orders):
                own = [take({"gradient": slope}, run) for slope in slopes]
                found[at] = (
                    own[0]
                    if _is_mean(exchange)
                    else self._every(exchange, course, orders[at], run, own)
                )
        if exchange.step == exchange.steps:
            self._forget()
        return [found[at] for at in range(len(orders))]

    def _every(
        self, exchange: Exchange, course: Course, order: Order, run: int, slopes: list[Groups]
    ) -> Groups:
        """Every client's own, in the order of the cohort, gathered as the phase says."""
        places = [
            (position, slope, at)
            for slope, runs in zip(slopes, course.clients, strict=True)
            for at, position in enumerate(runs[run])
        ]
        own = [take(slope, at) for _, slope, at in sorted(places, key=lambda place: place[0])]
        federation, source = self.store.federations[order.run], exchange.phase.reads.source
        examples = [len(federation.indices(source, client)) for client in order.cohort]
        slopes_only = replace(
            exchange.phase, collect={"gradient": exchange.phase.collect["gradient"]}, every={}
        )
        return gather(slopes_only, stacked(own), examples)

    def _slopes(
        self, exchange: Exchange, client: Gradient, course: Course, sents: Sequence[Groups]
    ) -> list[Tensors]:
        def round_by(name: str, _: int) -> None:
            self._said.clear()
            for desk in self._desks.values():
                desk.course = None  # so that teaching counts
            for step in range(exchange.steps):
                self._by(name, exchange, client, course, sents, step)

        runs, clients, size = course.lessons[-1].batches.y.shape[1:]
        kind = f"{exchange.phase.name}, {runs} x {clients} clients of {size}"
        names = () if kind in self.chooser.chosen else self._names(runs)
        name = self.chooser.pick(kind, names, round_by, per=exchange.steps)
        self._desks = {
            key: desk
            for key, desk in self._desks.items()
            if key.strategy in self.chooser.chosen.values()
        }
        return self.chooser.by(
            kind,
            name,
            lambda name: self._by(name, exchange, client, course, sents, exchange.step - 1),
        )

    def _names(self, runs: int) -> list[str]:
        """Worth a trial: one run alone has no streams of its own, and what did not pay to compile
        elsewhere will not here.
        """
        ways = {name: WAYS[name] for name in self.chooser.known if name in WAYS}
        idle = {
            name
            for name, way in ways.items()
            if not way.suits(self.model, self.chooser.fuses) or (runs == 1 and way.streams)
        }
        return [name for name in self.chooser.known if name not in idle]

    def _by(
        self,
        name: str,
        exchange: Exchange,
        client: Gradient,
        course: Course,
        sents: Sequence[Groups],
        step: int,
    ) -> list[Tensors]:
        key = Kind(name, client, _is_mean(exchange), course.shapes + tuple(map(shapes, sents)))
        if name in WAYS:
            return self._desk(key, course, sents).slopes(course, sents, step)
        sent, number = stacked(list(sents)), torch.full((1,), step, device=self.store.x.device)
        plan = self._traces.get(key) or self._programme(key, len(sents))
        if key not in self._traces and name == "traced":
            teach = trimmed(plan.teach, course.lessons)
            said = teach(course.lessons)
            plan = self._traces[key] = Programme(
                teach, trimmed(plan.slopes, sent, course.lessons, said, number)
            )
        turn = name, id(course)
        if turn not in self._said:
            self._said[turn] = plan.teach(course.lessons)
        return plan.slopes(sent, course.lessons, self._said[turn], number)

    def _desk(self, key: Kind, course: Course, sents: Sequence[Groups]) -> RecordedCourse:
        desk = self._desks.pop(key, None)
        if desk is None:
            way = WAYS[key.strategy]
            fuse = partial(compiled, kernels=way.kernels) if way.compiled else None
            desk = RecordedCourse(
                course, sents, self._programme(key, len(sents)), fuse, self.chooser.recordings.pool
            )
        self._desks[key] = desk  # at the end: the one longest unused is first
        if len(self._desks) > DESKS:
            del self._desks[next(iter(self._desks))]
        return desk

    def _programme(self, key: Kind, runs: int) -> Programme:
        name = key.strategy
        by_streams = name in WAYS and WAYS[name].streams
        over_runs = looped if runs == 1 or by_streams or name == "loop" else vmap
        return programme(
            self.model, key.client, key.mean, over_runs, looped if name == "loop" else vmap
        )


def _is_mean(exchange: Exchange) -> bool:
    """Whether one pass will do: the mean of the gradients is the gradient of the mean of the
    losses.
    """
    return exchange.phase.collect["gradient"] is not Collect.EVERY
