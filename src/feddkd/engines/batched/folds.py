"""The work of a fold over many lanes, and the two ways to do it that need no GPU."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor
from torch.func import vmap

from feddkd.engines.batched.lanes import BatchTable, Store
from feddkd.engines.compile.cuda_graph import copies
from feddkd.method import Batch, Fold, Phase
from feddkd.models.functional import Model
from feddkd.tensors import Groups
from feddkd.trees import unbind

READ_AHEAD = 1 << 20  # input numbers that are read at once


def take_lane(groups: Groups, lane: int) -> Groups:
    """Return one lane of stacked groups."""
    return {
        group: {name: tensor[lane] for name, tensor in tensors.items()}
        for group, tensors in groups.items()
    }


def take_lanes(groups: Groups, lanes: Tensor) -> Groups:
    """Return the lanes with these indices."""
    return {
        group: {name: tensor[lanes] for name, tensor in tensors.items()}
        for group, tensors in groups.items()
    }


def lane_range(groups: Groups, start: int, stop: int | None) -> Groups:
    """Return the lanes from `start` to `stop`."""
    return {
        group: {name: tensor[start:stop] for name, tensor in tensors.items()}
        for group, tensors in groups.items()
    }


def split_lanes(groups: Groups, lanes: int, copy: bool) -> list[dict[str, dict[str, Tensor]]]:
    """Return all lanes of stacked groups one by one.

    `copy`: as copies. A view of one lane keeps the memory of all lanes.
    """
    rows: list[dict[str, dict[str, Tensor]]] = [
        {group: {} for group in groups} for _ in range(lanes)
    ]
    for group, tensors in groups.items():
        for name, tensor in tensors.items():
            for row, lane in zip(rows, tensor.unbind(), strict=True):
                row[group][name] = lane.clone() if copy else lane
    return rows


def join_lanes(parts: list[Groups]) -> Groups:
    """Return the lanes of all parts, one part after the other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    return {
        group: {name: torch.cat([part[group][name] for part in parts]) for name in first[group]}
        for group in first
    }


def stacked(lanes: list[Groups]) -> Groups:
    """Return single lanes as stacked groups."""
    first = lanes[0]
    return {
        group: {name: torch.stack([lane[group][name] for lane in lanes]) for name in first[group]}
        for group in first
    }


def stacked_memos(memos: list[Groups]) -> Groups:
    """Return the groups that all memos hold, stacked.

    Some clients may hold more: a teacher, or a model that was tuned for an evaluation.
    """
    common = set.intersection(*map(set, memos))
    return stacked([{group: memo[group] for group in common} for memo in memos])


def lanes_in(groups: Groups) -> int:
    """Return the number of lanes of stacked groups."""
    return next(len(tensor) for tensors in groups.values() for tensor in tensors.values())


Shapes = tuple[tuple[int, ...], ...]


def shapes(groups: Groups) -> Shapes:
    """Return the shapes of all tensors."""
    return tuple(tuple(tensor.shape) for tensors in groups.values() for tensor in tensors.values())


def equal_positions(kinds: Sequence[object]) -> list[list[int]]:
    """Return the positions of each distinct kind."""
    return [
        [position for position, other in enumerate(kinds) if other == kind]
        for kind in dict.fromkeys(kinds)
    ]


@dataclass(frozen=True)
class Work:
    """A fold over a table of batches.

    If `shared`, all lanes are sent the same tensors; else `sent` has a lane axis.
    """

    model: Model
    store: Store
    phase: Phase
    client: Fold
    sent: Groups
    shared: bool
    table: BatchTable
    dtype: torch.dtype

    @cached_property
    def shapes(self) -> Shapes:
        """The shapes of the sent tensors: a program is made for one set of shapes."""
        return shapes(self.sent)

    def head(self, lanes: int) -> "Work":
        """Return the work of the first lanes."""
        return self if self.shared else replace(self, sent=lane_range(self.sent, 0, lanes))

    def after(self, steps: int) -> "Work":
        """Return the work that is left after some steps."""
        return replace(self, table=self.table.after(steps))

    def read(self, step: int, lanes: slice | Tensor, width: int) -> Batch:
        """Return the batches of one step, cut to a width."""
        table = self.table
        indices, share = table.indices[step, lanes, :width], table.share[step, lanes, :width]
        return self._read(indices, share, table.keys[step, lanes])

    def read_steps(self, steps: range, lanes: int, width: int) -> Iterator[Batch]:
        """Yield the batches of some steps of the first lanes.

        Small ones are read for many steps at once, which costs little more.
        """
        table = self.table
        ahead = max(1, READ_AHEAD // (lanes * width * self.store.numbers))
        for start in steps[::ahead]:
            rows = slice(start, min(start + ahead, steps.stop))
            indices, share = table.indices[rows, :lanes, :width], table.share[rows, :lanes, :width]
            keys = table.keys[rows, :lanes]
            read = self._read(indices.flatten(0, 1), share.flatten(0, 1), keys.flatten(0, 1))
            by_step = read.mapped(lambda tensor: tensor.reshape(-1, lanes, *tensor.shape[1:]))
            yield from map(Batch._make, unbind(by_step))

    def _read(self, indices: Tensor, share: Tensor, keys: Tensor) -> Batch:
        return self.store.read(indices, share, keys, self.dtype, self.phase.reads.random)

    def one_step(self, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        """Return the carry of one lane after a step."""
        return self.client.step(self.model, sent, carry, batch)

    def lane_step(self, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        """Return the carry of all lanes after a step."""
        return vmap(self.one_step, (None if self.shared else 0, 0, 0))(sent, carry, batch)

    def run(self, sent: Groups, carry: Groups, batches: Iterable[Batch]) -> Groups:
        """Return the carry of all lanes after one step for each batch."""
        for batch in batches:
            carry = self.lane_step(sent, carry, batch)
        return carry

    def equal_spans(self, padded: bool = False) -> Iterator[tuple[int, int | None, range]]:
        """Yield (active lanes, width of their batches, the steps in which these stay the same).

        The width is None if the batches of a step have different sizes and the network couples
        examples (as batch norm does), so that padding would change its results. If `padded`, a
        network that does not couple them gets all batches in one width: a smaller batch is then no
        new shape.
        """

        def kind(step: int) -> tuple[int, int | None]:
            sizes = self.table.sizes[step, : self.table.active[step]]
            if not self.model.couples:
                return len(sizes), self.table.indices.shape[2] if padded else int(sizes.max())
            return len(sizes), int(sizes[0]) if (sizes == sizes[0]).all() else None

        for (active, width), group in groupby(range(len(self.table.active)), key=kind):
            steps = list(group)
            yield active, width, range(steps[0], steps[-1] + 1)


# (sent, carry, batches of equal size) -> carry, over lanes
RunLanes = Callable[[Groups, Groups, Iterable[Batch]], Groups]
# (work, carry, width, active lanes, steps) -> carry, perhaps in tensors that the next call
# overwrites
RunSpan = Callable[[Work, Groups, int | None, int, range], Groups]


def run_vmap(
    work: Work,
    carry: Groups,
    steps: int | None = None,
    program: Callable[[Work], RunLanes] | None = None,
) -> Groups:
    """Run step by step over all active lanes: some first steps, or all of them.

    `program` returns a program for the shapes of a work; without it the steps run untraced.
    """

    def run_span(work: Work, carry: Groups, width: int | None, active: int, span: range) -> Groups:
        run = work.run if program is None else program(work)
        if width is None:
            return run_unequal(work, carry, active, span, run)
        return run(work.sent, carry, work.read_steps(span, lanes_in(carry), width))

    return run_spans(work, carry, steps, run_span, padded=program is not None)


def run_spans(
    work: Work,
    carry: Groups,
    steps: int | None,
    run_span: RunSpan,
    padded: bool,
    program_lanes: Callable[[int], int] | None = None,
) -> Groups:
    """Run one span of equal steps after another, and drop lanes that have finished.

    Where it takes long to make a program for another number of lanes, `program_lanes` returns the
    lanes of the program that serves a number of active lanes. The remaining lanes of a program are
    lanes that have finished; they compute on, and those results are not used.
    """
    finished, left = [], lanes_in(carry)
    for active, width, span in work.equal_spans(padded):
        if active < left:
            # copies: a recorded step continues to write to these tensors
            finished.append(copies(lane_range(carry, active, left)))
            left = active
        lanes = program_lanes(active) if program_lanes else active
        carry = carry if lanes >= lanes_in(carry) else lane_range(carry, 0, lanes)
        carry = run_span(work.head(lanes_in(carry)), carry, width, active, span[:steps])
        steps = None if steps is None else steps - len(span)
        if steps is not None and steps <= 0:
            break
    finished.append(copies(lane_range(carry, 0, left)))
    return join_lanes(finished[::-1])


def run_unequal(work: Work, carry: Groups, active: int, steps: range, run: RunLanes) -> Groups:
    """Run steps in which the lanes have batches of different sizes: each size separately."""
    for step in steps:
        moved = _unequal_step(work, carry, active, step, run)
        idle = lane_range(carry, active, None)
        carry = join_lanes([moved, idle]) if lanes_in(idle) else moved
    return carry


def _unequal_step(work: Work, carry: Groups, active: int, step: int, run: RunLanes) -> Groups:
    sizes = work.table.sizes[step, :active]
    moved: dict[int, Groups] = {}
    for size in sorted(set(sizes.tolist())):
        lanes = [lane for lane in range(active) if sizes[lane] == size]
        index = torch.tensor(lanes, device=work.table.indices.device)
        sent = work.sent if work.shared else take_lanes(work.sent, index)
        after = run(sent, take_lanes(carry, index), [work.read(step, index, size)])
        moved |= {lane: take_lane(after, row) for row, lane in enumerate(lanes)}
    return stacked([moved[lane] for lane in range(active)])


def run_loop(work: Work, carry: Groups, steps: int | None = None) -> Groups:
    """Run lane after lane, each through all its batches."""
    done = []
    for lane in range(lanes_in(carry)):
        sent = work.sent if work.shared else take_lane(work.sent, lane)
        lane_carry = take_lane(carry, lane)
        sizes = work.table.sizes[:, lane]
        for step in range(int((sizes > 0).sum()))[:steps]:
            batch = work.read(step, slice(lane, lane + 1), int(sizes[step]))
            one = batch.mapped(itemgetter(0))
            lane_carry = work.one_step(sent, lane_carry, one)
        done.append(lane_carry)
    return stacked(done)
