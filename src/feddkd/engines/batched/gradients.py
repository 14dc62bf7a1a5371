"""Gradients at shared weights, for several runs at once.

One backward pass takes the gradient of the mean of the clients' losses. Before it, one forward pass
computes the targets of all teachers for all steps of the round.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from feddkd.engines.batched.distil_batches import DistilRound, MemoOf, distil_rounds
from feddkd.engines.batched.distil_programs import (
    DistilFunctions,
    RecordedRound,
    distil_functions,
    looped,
)
from feddkd.engines.batched.folds import Shapes, shapes, stacked, take_lane
from feddkd.engines.batched.lanes import Store
from feddkd.engines.batched.strategies import GRAPHS, StrategyChooser
from feddkd.engines.client import client_weights, gather
from feddkd.engines.compile.cuda_folds import GraphOptions
from feddkd.engines.compile.simplify import trimmed
from feddkd.engines.compile.trace import compiled
from feddkd.engines.interface import Order
from feddkd.engines.memory import ran_out
from feddkd.method import Collect, Exchange, Gradient
from feddkd.models.functional import Model
from feddkd.tensors import Groups, Tensors

log = logging.getLogger(__name__)
# Recordings are kept for this many rounds of different shapes. Where there are more shapes, each of
# them comes too seldom.
RECORDED_ROUNDS = 8


class ProgramKey(NamedTuple):
    """The strategy, client half and shapes that a program was made for."""

    strategy: str
    client: Gradient
    mean: bool
    shapes: tuple[Shapes, ...]


class Gradients:
    """Answers exchanges whose clients differentiate at shared weights.

    Runs of equal shapes are computed together.
    """

    def __init__(
        self, model: Model, store: Store, dtype: torch.dtype, chooser: StrategyChooser
    ) -> None:
        self.model, self.store, self.dtype, self.chooser = model, store, dtype, chooser
        self.most = 1 << 30  # runs at once
        self._begun: object = None  # the client half and cohorts that the rounds are for
        self._rounds: list[DistilRound] = []
        # the targets of strategies that record nothing
        self._targets: dict[object, list[Tensor]] = {}
        self._recorded: dict[ProgramKey, RecordedRound] = {}
        self._traced: dict[ProgramKey, DistilFunctions] = {}

    def clear(self) -> None:
        self._forget_rounds()
        self._recorded.clear()
        self._traced.clear()

    def _forget_rounds(self) -> None:
        self._begun, self._rounds = None, []
        self._forget_targets()

    def _forget_targets(self) -> None:
        self._targets.clear()
        for recorded in self._recorded.values():
            recorded.round = None

    def __call__(
        self, exchange: Exchange, client: Gradient, orders: Sequence[Order], memo_of: MemoOf
    ) -> list[Groups]:
        """Return the gathered uploads for each order; fewer runs at once if memory runs out."""
        try:
            return self._gather(exchange, client, orders, memo_of)
        except (RuntimeError, MemoryError) as error:
            if min(self.most, len(orders)) == 1 or not ran_out(error):
                raise
        self.most = (min(self.most, len(orders)) + 1) // 2
        self.clear()
        self.chooser.clear()
        torch.cuda.empty_cache()
        log.warning(
            "%s: %d runs do not fit in memory; continuing with %d at once",
            exchange.phase.name,
            len(orders),
            self.most,
        )
        return self(exchange, client, orders, memo_of)

    def _gather(
        self, exchange: Exchange, client: Gradient, orders: Sequence[Order], memo_of: MemoOf
    ) -> list[Groups]:
        now = client, exchange.index, [(order.run, order.cohort) for order in orders]
        # a client may have stopped answering since the first step
        if exchange.step == 1 or now != self._begun:
            self._forget_rounds()
            self._rounds = distil_rounds(
                exchange, orders, self.store, memo_of, self.dtype, self.model.couples, self.most
            )
            self._begun = now
        gathered: dict[int, Groups] = {}
        for round in self._rounds:
            sents = [orders[number].sent for number in round.orders]
            gradients = self._gradients(exchange, client, round, sents)
            for run, number in enumerate(round.orders):
                of_run = [take_lane({"gradient": gradient}, run) for gradient in gradients]
                if _is_mean(exchange):
                    gathered[number] = of_run[0]
                else:
                    gathered[number] = self._every(exchange, round, orders[number], run, of_run)
        if exchange.step == exchange.steps:
            self._forget_rounds()
        return [gathered[number] for number in range(len(orders))]

    def _every(
        self, exchange: Exchange, round: DistilRound, order: Order, run: int, blocks: list[Groups]
    ) -> Groups:
        """Return the clients' gradients, in cohort order, gathered by the phase's rule."""
        by_position = {
            position: take_lane(block, row)
            for block, runs in zip(blocks, round.clients, strict=True)
            for row, position in enumerate(runs[run])
        }
        uploads = [by_position[position] for position in sorted(by_position)]
        phase = exchange.phase
        only_gradient = replace(phase, collect={"gradient": phase.collect["gradient"]}, every={})
        examples = client_weights(self.store.federations[order.run], phase, order.cohort)
        return gather(only_gradient, stacked(uploads), examples)

    def _gradients(
        self, exchange: Exchange, client: Gradient, round: DistilRound, sents: Sequence[Groups]
    ) -> list[Tensors]:
        def run_step(name: str, step: int) -> list[Tensors]:
            return self._run_step(name, exchange, client, round, sents, step)

        def trial(name: str, _: int) -> None:
            self._forget_targets()  # so that the time for the targets counts
            for step in range(exchange.steps):
                run_step(name, step)

        runs, clients, size = round.blocks[-1].batches.share.shape[1:]
        kind = f"{exchange.phase.name}, {runs} x {clients} clients of {size}"
        now = partial(run_step, step=exchange.step - 1)
        share = 1 / exchange.steps  # a trial computes all steps of the round
        key = round.shapes + tuple(map(shapes, sents))
        result = self.chooser.compute(kind, self._names(runs), now, trial, key=key, steps=share)
        used = set(self.chooser.chosen.values())
        self._recorded = {k: each for k, each in self._recorded.items() if k.strategy in used}
        self._traced = {k: each for k, each in self._traced.items() if k.strategy in used}
        return result

    def _names(self, runs: int) -> list[str]:
        """Return the strategies worth a trial.

        Streams need several runs. Compiling is tried only if it was faster elsewhere.
        """
        names = []
        for name in self.chooser.names:
            graph = GRAPHS.get(name, GraphOptions())
            if graph.suits(self.model, self.chooser.compiles) and (runs > 1 or not graph.streams):
                names.append(name)
        return names

    def _run_step(
        self,
        name: str,
        exchange: Exchange,
        client: Gradient,
        round: DistilRound,
        sents: Sequence[Groups],
        step: int,
    ) -> list[Tensors]:
        key = ProgramKey(name, client, _is_mean(exchange), round.shapes + tuple(map(shapes, sents)))
        if name in GRAPHS:
            return self._recorded_round(key, round, sents).gradients(round, sents, step)
        sent, number = stacked(list(sents)), torch.full((1,), step, device=self.store.device)
        functions = self._traced.get(key) or self._functions(key, len(sents))
        if key not in self._traced and name == "traced":
            traced_targets = trimmed(functions.targets, round.blocks)
            inputs = sent, round.blocks, traced_targets(round.blocks), number
            functions = DistilFunctions(traced_targets, trimmed(functions.gradients, *inputs))
            self._traced[key] = functions
        targets_key = name, id(round)
        if targets_key not in self._targets:
            self._targets[targets_key] = functions.targets(round.blocks)
        return functions.gradients(sent, round.blocks, self._targets[targets_key], number)

    def _recorded_round(
        self, key: ProgramKey, round: DistilRound, sents: Sequence[Groups]
    ) -> RecordedRound:
        recorded = self._recorded.pop(key, None)
        if recorded is None:
            graph = GRAPHS[key.strategy]
            fuse = partial(compiled, kernels=graph.kernels) if graph.compiled else None
            functions, pool = self._functions(key, len(sents)), self.chooser.recordings.pool(graph)
            recorded = RecordedRound(round, sents, functions, fuse, pool)
        self._recorded[key] = recorded  # at the end: the first one has been unused for longest
        if len(self._recorded) > RECORDED_ROUNDS:
            del self._recorded[next(iter(self._recorded))]
        return recorded

    def _functions(self, key: ProgramKey, runs: int) -> DistilFunctions:
        name = key.strategy
        by_streams = name in GRAPHS and GRAPHS[name].streams
        over_runs = looped if runs == 1 or by_streams or name == "loop" else vmap
        over_clients = looped if name == "loop" else vmap
        return distil_functions(self.model, key.client, key.mean, over_runs, over_clients)


def _is_mean(exchange: Exchange) -> bool:
    """Return whether one backward pass is enough.

    It is for a mean: the mean of the gradients is the gradient of the mean of the losses.
    """
    return exchange.phase.collect["gradient"] is not Collect.EVERY
