"""Steps recorded as CUDA graphs: everything a step reads and writes lives in fixed places, and a counter on the device says which
row of the tape is next. Replaying a step costs one launch, whatever it is made of."""

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

from feddkd.engines.tracing import compiled
from feddkd.engines.work import Work, advance, join, lanes_in, part, shapes, take
from feddkd.method import Batch
from feddkd.params import Groups

WARM_UP = 3
STRIDE = 7  # steps in one graph, besides a graph of one; 49 batches an epoch are seven of them


class Way(NamedTuple):
    """How the lanes of a step are recorded: vectorised or on a stream each; as they are, or traced and compiled first."""

    streams: bool = False
    compiled: bool = False


def _clone(groups: Groups) -> Groups:
    return {g: {name: tensor.clone() for name, tensor in tensors.items()} for g, tensors in groups.items()}


def _copy(target: Groups, source: Groups) -> None:
    """The one place where tensors are written to: fixed places are what a graph is about."""
    for group, tensors in source.items():
        for name, tensor in tensors.items():
            target[group][name].copy_(tensor)


class Replay:
    """A pure function of tensors as a CUDA graph, for inputs of the same shapes."""

    def __init__(self, function: Callable[..., Any], inputs: Any, fuse: bool) -> None:
        self.inputs = tree_map(torch.clone, inputs)
        function = compiled(function, *self.inputs) if fuse else function
        device = next(tensor.device for tensor in tree_leaves(inputs))
        _in_peace(lambda: function(*self.inputs), device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = function(*self.inputs)

    def __call__(self, inputs: Any) -> Any:
        for place, tensor in zip(tree_leaves(self.inputs), tree_leaves(inputs), strict=True):
            place.copy_(tensor)
        self.graph.replay()
        return tree_map(torch.clone, self.outputs)


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _in_peace(function: Callable[[], Any], device: torch.device) -> None:
    """Warm up on a stream of its own, as recording asks for."""
    calm = _stream(device)
    calm.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(calm):
        for _ in range(WARM_UP):
            function()
    torch.cuda.current_stream(device).wait_stream(calm)


class Recording:
    """One step over so many lanes with batches of one width."""

    def __init__(
        self, work: Work, carry: Groups, width: int, way: Way, pool: Any, lane_steps: dict[object, Callable[..., Groups]]
    ) -> None:
        lanes, device = lanes_in(carry), work.tape.indices.device
        self.work, self.width, self.way = work, width, way
        self.carry, self.sent = _clone(carry), _clone(work.sent)
        self.indices = torch.zeros(len(work.tape.active), lanes, width, dtype=torch.int64, device=device)
        self.share = torch.zeros(self.indices.shape, dtype=work.dtype, device=device)
        self.keys = torch.zeros(self.indices.shape[:2], dtype=torch.int64, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.side = [_stream(device) for _ in range(lanes if way.streams else 0)]
        self._load(work, carry, range(1))
        self.call: Callable[..., Groups] = work.one if way.streams else work.many
        if way.compiled:
            self.call = self._compile(lane_steps)
        self._record(device, pool)

    def _compile(self, lane_steps: dict[object, Callable[..., Groups]]) -> Callable[..., Groups]:
        """The step with the writing back of its results inside, so that the compiler can write them where they belong at once."""
        step, batch = self.call, self._read(slice(None))

        def written(sent: Groups, carry: Groups, batch: Batch) -> Groups:
            _copy(carry, step(sent, carry, batch))
            return {}

        if not self.way.streams:
            return compiled(written, self.sent, self.carry, batch)
        sent = self.sent if self.work.shared else take(self.sent, 0)
        key = (self.work.phase.name, self.width, shapes(sent))
        if key not in lane_steps:
            own, lane = take(self.carry, 0), Batch(*(tensor[0] for tensor in batch))
            lane_steps[key] = compiled(written, sent, own, lane, channels_last=True)
        return lane_steps[key]

    def _record(self, device: torch.device, pool: Any) -> None:
        def again() -> None:
            self.step.zero_()
            self._body()

        _in_peace(again, device)
        self.graphs = {}
        for steps in (STRIDE, 1):
            self.graphs[steps] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[steps], pool=pool):
                for _ in range(steps):
                    self._body()

    def _read(self, lanes: slice) -> Batch:
        cut = self.indices[self.step][0, lanes], self.share[self.step][0, lanes], self.keys[self.step][0, lanes]
        return self.work.store.read(*cut, self.work.dtype, self.work.phase.reads.random)

    def _body(self) -> None:
        if self.way.streams:
            self._lane_by_lane()
        else:
            _copy(self.carry, self.call(self.sent, self.carry, self._read(slice(None))))
        self.step.add_(1)

    def _lane_by_lane(self) -> None:
        main = torch.cuda.current_stream(self.step.device)
        for lane, stream in enumerate(self.side):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                batch = Batch(*(tensor[0] for tensor in self._read(slice(lane, lane + 1))))
                sent, own = self.sent if self.work.shared else take(self.sent, lane), take(self.carry, lane)
                _copy(own, self.call(sent, own, batch))
        for stream in self.side:
            main.wait_stream(stream)

    def _load(self, work: Work, carry: Groups, span: range) -> None:
        lanes, tape = lanes_in(self.carry), work.tape
        _copy(self.carry, carry)
        _copy(self.sent, work.sent)
        rows = slice(span.start, span.stop)
        self.indices[: len(span)].copy_(tape.indices[rows, :lanes, : self.width])
        self.share[: len(span)].copy_(tape.share[rows, :lanes, : self.width])
        self.keys[: len(span)].copy_(tape.keys[rows, :lanes])
        self.step.zero_()

    def run(self, work: Work, carry: Groups, span: range) -> Groups:
        self._load(work, carry, span)
        strides, rest = divmod(len(span), STRIDE)
        for steps, times in ((STRIDE, strides), (1, rest)):
            for _ in range(times):
                self.graphs[steps].replay()
        return _clone(self.carry)


class Recordings:
    """Recordings by what they do, made when first needed and kept for the rounds to come."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], Recording] = {}
        self._replays: dict[tuple[object, ...], Replay] = {}
        self._lane_steps: dict[object, Callable[..., Groups]] = {}  # compiled for one lane, which serves any number of them
        self._pool: Any = None

    def clear(self) -> None:
        self._kept.clear()
        self._replays.clear()

    def call(self, name: str, function: Callable[..., Any], inputs: Any, fuse: bool) -> Any:
        """A function of tensors, recorded (and compiled before) when it is first called with inputs of these shapes."""
        key = (name, *(tensor.shape for tensor in tree_leaves(inputs)))
        if key not in self._replays:
            self._replays[key] = Replay(function, inputs, fuse)
        return self._replays[key](inputs)

    def run(self, work: Work, carry: Groups, steps: int | None, way: Way) -> Groups:
        finished: list[Groups] = []
        for active, width, span in _spans(work):
            if active < lanes_in(carry):
                finished.append(part(carry, active, None))
                carry = part(carry, 0, active)
            here = work.head(active)
            if width is None:
                for step in span[:steps]:
                    carry = advance(here, carry, step, active, here.many)
            else:
                carry = self._recording(here, carry, width, way).run(here, carry, span[:steps])
            if steps is not None:
                break
        return join([carry, *reversed(finished)])

    def _recording(self, work: Work, carry: Groups, width: int, way: Way) -> Recording:
        key = (work.phase.name, lanes_in(carry), width, work.shared, way, work.shapes)
        kept = self._kept.get(key)
        if kept is None or len(kept.indices) < len(work.tape.active) or kept.work.client is not work.client:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            kept = self._kept[key] = Recording(work, carry, width, way, self._pool, self._lane_steps)
        return kept


def _spans(work: Work) -> Iterator[tuple[int, int | None, range]]:
    """(lanes at work, width of their batches, steps). Width None: batch norm, and batches of different sizes in one step."""

    def kind(step: int) -> tuple[int, int | None]:
        active = work.tape.active[step]
        sizes = work.tape.sizes[step, :active]
        if not work.model.norm_names:
            return active, work.tape.indices.shape[2]
        return active, int(sizes[0]) if (sizes == sizes[0]).all() else None

    for (active, width), steps in groupby(range(len(work.tape.sizes)), key=kind):
        at = list(steps)
        yield active, width, range(at[0], at[-1] + 1)
