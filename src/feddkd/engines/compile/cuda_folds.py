"""Steps recorded as CUDA graphs: everything a step reads and writes lives in fixed places, and a
counter on the device says which row of the tape is next. Replaying a step costs one launch,
whatever it is made of.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from feddkd.engines.batched.folds import Work, advance, lanes_in, run_plateaus, shapes, take
from feddkd.engines.compile.cuda_graph import copies, in_peace, new_stream, recorded
from feddkd.engines.compile.trace import compiled
from feddkd.method import Batch
from feddkd.models.functional import Model
from feddkd.tensors import Groups

STRIDE = 7  # steps in one graph, besides a graph of one; 49 batches an epoch are seven of them


class Way(NamedTuple):
    """How the lanes of a step are recorded: vectorised or on a stream each; as they are, or traced
    and compiled first, perhaps with kernels of our own for convolutions.
    """

    streams: bool = False
    compiled: bool = False
    kernels: bool = False

    def suits(self, model: Model, often: bool = True) -> bool:
        """Whether it is worth a trial: compiling is not for what is done seldom."""
        return (often or not self.compiled) and (model.convolves or not self.kernels)


def _copy(target: Groups, source: Groups) -> None:
    """The one place where tensors are written to: fixed places are what a graph is about."""
    for group, tensors in source.items():
        for name, tensor in tensors.items():
            target[group][name].copy_(tensor)


class Recording:
    """One step over so many lanes with batches of one width."""

    def __init__(
        self,
        work: Work,
        carry: Groups,
        width: int,
        way: Way,
        pool: Any,
        lane_steps: dict[object, Callable[..., Groups]],
    ) -> None:
        lanes, device = lanes_in(carry), work.tape.indices.device
        self.work, self.width, self.way = work, width, way
        self.carry: Groups = copies(carry)
        self.sent: Groups = copies(work.sent)
        # a longer round to come need not be recorded anew
        rows = 1 << (len(work.tape.active) - 1).bit_length()
        self.indices = torch.zeros(rows, lanes, width, dtype=torch.int64, device=device)
        self.share = torch.zeros(self.indices.shape, dtype=work.dtype, device=device)
        self.keys = torch.zeros(self.indices.shape[:2], dtype=torch.int64, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.side = [new_stream(device) for _ in range(lanes if way.streams else 0)]
        self._load(work, carry, 0)
        self.call: Callable[..., Groups] = work.one if way.streams else work.many
        if way.compiled:
            self.call = self._compile(lane_steps)
        self._record(device, pool)

    def _compile(self, lane_steps: dict[object, Callable[..., Groups]]) -> Callable[..., Groups]:
        """The step with the writing back of its results inside, so that the compiler can write them
        where they belong at once; over all lanes also with the reading of its batch.
        """
        step, batch = self.call, self._read(slice(None))

        def written(sent: Groups, carry: Groups, batch: Batch) -> Groups:
            _copy(carry, step(sent, carry, batch))
            return {}

        def whole(
            sent: Groups, carry: Groups, x: Tensor, y: Tensor, number: Tensor, *tape: Tensor
        ) -> Groups:
            indices, share, keys = (tensor.index_select(0, number).squeeze(0) for tensor in tape)
            store = replace(self.work.store, x=x, y=y)
            return written(
                sent,
                carry,
                store.read(indices, share, keys, self.work.dtype, self.work.phase.reads.random),
            )

        if not self.way.streams:
            return compiled(whole, *self._everything, kernels=self.way.kernels)
        sent = self.sent if self.work.shared else take(self.sent, 0)
        key = (self.work.client, self.width, shapes(sent))
        if key not in lane_steps:
            own, lane = take(self.carry, 0), Batch(*(tensor[0] for tensor in batch))
            lane_steps[key] = compiled(written, sent, own, lane, channels_last=True)
        return lane_steps[key]

    @property
    def _everything(self) -> tuple[Any, ...]:
        """All that a compiled step over all lanes reads, where it lies."""
        store = self.work.store
        return (
            self.sent,
            self.carry,
            store.x,
            store.y,
            self.step,
            self.indices,
            self.share,
            self.keys,
        )

    def _record(self, device: torch.device, pool: Any) -> None:
        def again() -> None:
            self.step.zero_()
            self._body()

        in_peace(again, device)
        self.graphs = {steps: recorded(partial(self._steps, steps), pool) for steps in (STRIDE, 1)}

    def _steps(self, count: int) -> None:
        for _ in range(count):
            self._body()

    def _read(self, lanes: slice) -> Batch:
        cut = (
            self.indices[self.step][0, lanes],
            self.share[self.step][0, lanes],
            self.keys[self.step][0, lanes],
        )
        return self.work.store.read(*cut, self.work.dtype, self.work.phase.reads.random)

    def _body(self) -> None:
        if self.way.streams:
            self._lane_by_lane()
        elif self.way.compiled:
            self.call(*self._everything)
        else:
            _copy(self.carry, self.call(self.sent, self.carry, self._read(slice(None))))
        self.step.add_(1)

    def _lane_by_lane(self) -> None:
        main = torch.cuda.current_stream(self.step.device)
        for lane, stream in enumerate(self.side):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                batch = Batch(*(tensor[0] for tensor in self._read(slice(lane, lane + 1))))
                sent, own = (
                    self.sent if self.work.shared else take(self.sent, lane),
                    take(self.carry, lane),
                )
                _copy(own, self.call(sent, own, batch))
        for stream in self.side:
            main.wait_stream(stream)

    def _load(self, work: Work, carry: Groups, start: int) -> None:
        """All that is read from this step on."""
        _copy(self.carry, carry)
        _copy(self.sent, work.sent)
        lanes, rows = lanes_in(self.carry), len(work.tape.active) - start
        self.indices[:rows].copy_(work.tape.indices[start:, :lanes, : self.width])
        self.share[:rows].copy_(work.tape.share[start:, :lanes, : self.width])
        self.keys[:rows].copy_(work.tape.keys[start:, :lanes])
        self.step.zero_()

    def run(self, work: Work, carry: Groups, span: range) -> Groups:
        """The carry where it lies: its next steps, if they are done here, too, need nothing to be
        copied.
        """
        if carry is not self.carry:
            self._load(work, carry, span.start)
        strides, rest = divmod(len(span), STRIDE)
        for steps, times in ((STRIDE, strides), (1, rest)):
            for _ in range(times):
                self.graphs[steps].replay()
        return self.carry


class Recordings:
    """Recordings by what they do, made when first needed and kept for the rounds to come."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], Recording] = {}
        # compiled for one lane, which serves any number of them
        self._lane_steps: dict[object, Callable[..., Groups]] = {}
        self._pool: Any = None

    def clear(self) -> None:
        self._kept.clear()
        self._pool = None

    @property
    def pool(self) -> Any:
        """Memory that all graphs share: none runs beside another, and what outlives a replay lies
        outside.
        """
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return self._pool

    def run(self, work: Work, carry: Groups, steps: int | None, way: Way) -> Groups:
        def stretch(
            here: Work, carry: Groups, width: int | None, active: int, span: range
        ) -> Groups:
            if width is None:
                return advance(here, carry, active, span, here.walk)
            return self._recording(here, carry, width, way).run(here, carry, span)

        # a stream serves any number of lanes, and to record is cheap: only what is compiled for so
        # many lanes is made to last
        places = _places if way.compiled and not way.streams else None
        return run_plateaus(work, carry, steps, stretch, padded=True, places=places)

    def _recording(self, work: Work, carry: Groups, width: int, way: Way) -> Recording:
        key = (work.client, lanes_in(carry), width, work.shared, way, work.shapes)
        kept = self._kept.get(key)
        if kept is None or len(kept.indices) < len(work.tape.active):
            kept = self._kept[key] = Recording(work, carry, width, way, self.pool, self._lane_steps)
        return kept


def _places(lanes: int) -> int:
    """The next number of the form 2^k or 3 * 2^k: clients of n different sizes need some 2 log2(n)
    programs instead of n.
    """
    power = 1 << (lanes - 1).bit_length()
    return power * 3 // 4 if power * 3 // 4 >= lanes else power
