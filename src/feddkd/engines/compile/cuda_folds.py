"""The steps of a fold, recorded as CUDA graphs.

A step reads and writes fixed tensors only, and a counter on the device says which row of the table
of batches is next. A replay of a step costs one launch, however many operations it has.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from feddkd.engines.batched.folds import (
    Work,
    lanes_in,
    run_spans,
    run_unequal,
    shapes,
    take_lane,
)
from feddkd.engines.compile.cuda_graph import copies, new_stream, record_graph, warmed_up
from feddkd.engines.compile.trace import compiled
from feddkd.method import Batch
from feddkd.models.functional import Model
from feddkd.tensors import Groups
from feddkd.trees import Tree

STRIDE = 7  # steps in one graph, besides a graph of one step; 49 batches an epoch are 7 of them
LaneSteps = dict[object, Callable[..., Groups]]


class GraphOptions(NamedTuple):
    """The form in which a step is recorded.

    It is vectorised over lanes, or has one stream for each lane; it may be traced and compiled
    first, and convolutions may use the Triton kernels of this package.
    """

    streams: bool = False
    compiled: bool = False
    kernels: bool = False

    def suits(self, model: Model, often: bool = True) -> bool:
        """Return whether it is worth a trial: compiling is not, for work that is done seldom."""
        return (often or not self.compiled) and (model.convolves or not self.kernels)


def _copy(target: Groups, source: Groups) -> None:
    """Copy tensors to fixed places; nothing else in this module writes to tensors."""
    for group, tensors in source.items():
        for name, tensor in tensors.items():
            target[group][name].copy_(tensor)


class Recording:
    """One recorded step, for a number of lanes and batches of one width."""

    def __init__(
        self,
        work: Work,
        carry: Groups,
        width: int,
        options: GraphOptions,
        pool: Any,
        lane_steps: LaneSteps,
    ) -> None:
        lanes, device = lanes_in(carry), work.table.indices.device
        self.work, self.width, self.options = work, width, options
        self.carry: Groups = copies(carry)
        self.sent: Groups = copies(work.sent)
        # more rows than needed, so that a somewhat longer round needs no new recording
        rows = 1 << (len(work.table.active) - 1).bit_length()
        self.indices = torch.zeros(rows, lanes, width, dtype=torch.int64, device=device)
        self.share = torch.zeros(self.indices.shape, dtype=work.dtype, device=device)
        self.keys = torch.zeros(self.indices.shape[:2], dtype=torch.int64, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.streams = [new_stream(device) for _ in range(lanes if options.streams else 0)]
        self._load(work, carry, 0)
        self.call: Callable[..., Groups] = work.one_step if options.streams else work.lane_step
        if options.compiled:
            self.call = self._compile(lane_steps)
        self._record(device, pool)

    def _compile(self, lane_steps: LaneSteps) -> Callable[..., Groups]:
        """Return the compiled step, which writes its results back.

        So the compiler can write them to their places at once. A step over all lanes also reads its
        batch.
        """
        step, batch = self.call, self._read(slice(None))

        def write_back(sent: Groups, carry: Groups, batch: Batch) -> Groups:
            _copy(carry, step(sent, carry, batch))
            return {}

        def whole_step(
            sent: Groups, carry: Groups, x: Tree, y: Tree, number: Tensor, *table: Tensor
        ) -> Groups:
            indices, share, keys = (tensor.index_select(0, number).squeeze(0) for tensor in table)
            store, random = replace(self.work.store, x=x, y=y), self.work.phase.reads.random
            read = store.read(indices, share, keys, self.work.dtype, random)
            return write_back(sent, carry, read)

        if not self.options.streams:
            return compiled(whole_step, *self._inputs, kernels=self.options.kernels)
        sent = self.sent if self.work.shared else take_lane(self.sent, 0)
        key = (self.work.client, self.width, shapes(sent))
        if key not in lane_steps:
            example = sent, take_lane(self.carry, 0), batch.mapped(itemgetter(0))
            lane_steps[key] = compiled(write_back, *example, channels_last=True)
        return lane_steps[key]

    @property
    def _inputs(self) -> tuple[Any, ...]:
        """The fixed tensors that a compiled step over all lanes reads."""
        x, y = self.work.store.x, self.work.store.y
        return self.sent, self.carry, x, y, self.step, self.indices, self.share, self.keys

    def _record(self, device: torch.device, pool: Any) -> None:
        def first_step() -> None:
            self.step.zero_()
            self._run_step()

        warmed_up(first_step, device)
        self.graphs = {
            steps: record_graph(partial(self._run_steps, steps), pool) for steps in (STRIDE, 1)
        }

    def _run_steps(self, count: int) -> None:
        for _ in range(count):
            self._run_step()

    def _read(self, lanes: slice) -> Batch:
        row = (
            self.indices[self.step][0, lanes],
            self.share[self.step][0, lanes],
            self.keys[self.step][0, lanes],
        )
        return self.work.store.read(*row, self.work.dtype, self.work.phase.reads.random)

    def _run_step(self) -> None:
        if self.options.streams:
            self._run_lanes()
        elif self.options.compiled:
            self.call(*self._inputs)
        else:
            _copy(self.carry, self.call(self.sent, self.carry, self._read(slice(None))))
        self.step.add_(1)

    def _run_lanes(self) -> None:
        """Run a step of each lane on the stream of the lane."""
        main = torch.cuda.current_stream(self.step.device)
        for lane, stream in enumerate(self.streams):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                batch = self._read(slice(lane, lane + 1)).mapped(itemgetter(0))
                sent = self.sent if self.work.shared else take_lane(self.sent, lane)
                carry = take_lane(self.carry, lane)
                _copy(carry, self.call(sent, carry, batch))
        for stream in self.streams:
            main.wait_stream(stream)

    def _load(self, work: Work, carry: Groups, start: int) -> None:
        """Copy everything that the steps from `start` on read."""
        _copy(self.carry, carry)
        _copy(self.sent, work.sent)
        lanes, rows = lanes_in(self.carry), len(work.table.active) - start
        self.indices[:rows].copy_(work.table.indices[start:, :lanes, : self.width])
        self.share[:rows].copy_(work.table.share[start:, :lanes, : self.width])
        self.keys[:rows].copy_(work.table.keys[start:, :lanes])
        self.step.zero_()

    def run(self, work: Work, carry: Groups, span: range) -> Groups:
        """Return the carry after some steps, in its fixed place.

        If this recording also runs the next steps, nothing is copied between.
        """
        if carry is not self.carry:
            self._load(work, carry, span.start)
        strides, rest = divmod(len(span), STRIDE)
        for steps, times in ((STRIDE, strides), (1, rest)):
            for _ in range(times):
                self.graphs[steps].replay()
        return self.carry


class Recordings:
    """Recordings, made at their first use and kept for later rounds."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], Recording] = {}
        # steps compiled for one lane, which serve any number of lanes
        self._lane_steps: LaneSteps = {}
        self._pools: dict[GraphOptions, Any] = {}

    def clear(self) -> None:
        self._kept.clear()
        self._lane_steps.clear()
        self._pools.clear()

    def forget(self, options: GraphOptions) -> None:
        """Free everything of one form; the next recording begins in new memory."""
        self._kept = {key: kept for key, kept in self._kept.items() if kept.options != options}
        self._pools.pop(options, None)
        if options.streams and options.compiled:
            self._lane_steps.clear()

    def pool(self, options: GraphOptions) -> Any:
        """Return the memory that all graphs of one form share.

        This is safe: no two graphs run at the same time, and results that are kept lie outside.
        """
        if options not in self._pools:
            self._pools[options] = torch.cuda.graph_pool_handle()
        return self._pools[options]

    def run(self, work: Work, carry: Groups, steps: int | None, options: GraphOptions) -> Groups:
        """Return the carry after the first steps of a fold, or after all of them."""

        def run_span(
            work: Work, carry: Groups, width: int | None, active: int, span: range
        ) -> Groups:
            if width is None:
                return run_unequal(work, carry, active, span, work.run)
            return self._recording(work, carry, width, options).run(work, carry, span)

        # only steps compiled for a number of lanes take long to make: recording alone is fast, and
        # a step compiled for one stream serves any number of lanes
        lanes = program_lanes if options.compiled and not options.streams else None
        return run_spans(work, carry, steps, run_span, padded=True, program_lanes=lanes)

    def _recording(self, work: Work, carry: Groups, width: int, options: GraphOptions) -> Recording:
        key = (work.client, lanes_in(carry), width, work.shared, options, work.shapes)
        kept = self._kept.get(key)
        if kept is None or len(kept.indices) < len(work.table.active):
            pool = self.pool(options)
            kept = Recording(work, carry, width, options, pool, self._lane_steps)
            self._kept[key] = kept
        return kept


def program_lanes(active: int) -> int:
    """Return the next number of the form 2^k or 3 * 2^k.

    Clients of n different sizes then need about 2 log2(n) programs instead of n.
    """
    power = 1 << (active - 1).bit_length()
    return power * 3 // 4 if power * 3 // 4 >= active else power
