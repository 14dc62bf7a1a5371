"""The work of a fold over many lanes, and the two ways to do it that need no GPU."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor
from torch.func import vmap

from feddkd.engines.batched.lanes import Store, Tape
from feddkd.engines.compile.cuda_graph import copies
from feddkd.method import Batch, Fold, Phase
from feddkd.models.functional import Model
from feddkd.tensors import Groups

AHEAD = 1 << 20  # numbers that are read at once


def take(groups: Groups, lane: int) -> Groups:
    """One lane of stacked groups."""
    return {
        group: {name: tensor[lane] for name, tensor in tensors.items()}
        for group, tensors in groups.items()
    }


def apart(groups: Groups, lanes: int) -> list[dict[str, dict[str, Tensor]]]:
    """All lanes of stacked groups, each for itself: one call a tensor, not one a lane."""
    rows: list[dict[str, dict[str, Tensor]]] = [
        {group: {} for group in groups} for _ in range(lanes)
    ]
    for group, tensors in groups.items():
        for name, tensor in tensors.items():
            for row, own in zip(rows, tensor.unbind(), strict=True):
                row[group][name] = own
    return rows


def part(groups: Groups, start: int, stop: int | None) -> Groups:
    """Some lanes of stacked groups."""
    return {
        group: {name: tensor[start:stop] for name, tensor in tensors.items()}
        for group, tensors in groups.items()
    }


def join(parts: list[Groups]) -> Groups:
    """Lanes put back together."""
    if len(parts) == 1:
        return parts[0]
    return {
        g: {name: torch.cat([p[g][name] for p in parts]) for name in parts[0][g]} for g in parts[0]
    }


def stacked(many: list[Groups]) -> Groups:
    return {
        g: {name: torch.stack([one[g][name] for one in many]) for name in many[0][g]}
        for g in many[0]
    }


def chosen(groups: Groups, lanes: Tensor) -> Groups:
    return {
        group: {name: tensor[lanes] for name, tensor in tensors.items()}
        for group, tensors in groups.items()
    }


def lanes_in(groups: Groups) -> int:
    return next(len(tensor) for tensors in groups.values() for tensor in tensors.values())


Shapes = tuple[tuple[int, ...], ...]


def shapes(groups: Groups) -> Shapes:
    return tuple(tuple(tensor.shape) for tensors in groups.values() for tensor in tensors.values())


def grouped(kinds: Sequence[object]) -> list[list[int]]:
    """Positions of equal kinds, together."""
    return [
        [at for at, other in enumerate(kinds) if other == kind] for kind in dict.fromkeys(kinds)
    ]


@dataclass(frozen=True)
class Work:
    """A fold over a tape: what is sent is the same for all lanes (`shared`), or has a lane axis of
    its own.
    """

    model: Model
    store: Store
    phase: Phase
    client: Fold
    sent: Groups
    shared: bool
    tape: Tape
    dtype: torch.dtype

    @cached_property
    def shapes(self) -> Shapes:
        """Of what is sent: a program made for other shapes is another program."""
        return shapes(self.sent)

    def head(self, lanes: int) -> "Work":
        """The work of the first lanes alone."""
        return self if self.shared else replace(self, sent=part(self.sent, 0, lanes))

    def read(self, step: int, lanes: slice | Tensor, width: int) -> Batch:
        tape = self.tape
        cut = (
            tape.indices[step, lanes, :width],
            tape.share[step, lanes, :width],
            tape.keys[step, lanes],
        )
        return self.store.read(*cut, self.dtype, self.phase.reads.random)

    def read_on(self, span: range, lanes: int, width: int) -> Iterator[Batch]:
        """The batches of some steps of the first lanes.

        Small ones are read many steps at once, which costs little more.
        """
        ahead = max(1, AHEAD // (lanes * width * self.store.x[0].numel()))
        for at in span[::ahead]:
            rows, tape = slice(at, min(at + ahead, span.stop)), self.tape
            cut = (
                tape.indices[rows, :lanes, :width],
                tape.share[rows, :lanes, :width],
                tape.keys[rows, :lanes],
            )
            indices, share, keys = (tensor.flatten(0, 1) for tensor in cut)
            read = self.store.read(indices, share, keys, self.dtype, self.phase.reads.random)
            yield from map(
                Batch._make,
                zip(
                    *(tensor.reshape(-1, lanes, *tensor.shape[1:]) for tensor in read), strict=True
                ),
            )

    def one(self, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        return self.client.step(self.model, sent, carry, batch)

    def many(self, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        return vmap(self.one, (None if self.shared else 0, 0, 0))(sent, carry, batch)

    def walk(self, sent: Groups, carry: Groups, batches: Iterable[Batch]) -> Groups:
        for batch in batches:
            carry = self.many(sent, carry, batch)
        return carry

    def plateaus(self, padded: bool = False) -> Iterator[tuple[int, int | None, range]]:
        """Yield (lanes at work, width of their batches, steps for which it is those).

        Width None: batches of different sizes in one step, and a network that couples examples
        (batch norm does), which would feel padding. Padded: where it does not, all batches are of
        one width, so that a partial one is no new shape.
        """

        def kind(step: int) -> tuple[int, int | None]:
            sizes = self.tape.sizes[step, : self.tape.active[step]]
            if not self.model.couples:
                return len(sizes), self.tape.indices.shape[2] if padded else int(sizes.max())
            return len(sizes), int(sizes[0]) if (sizes == sizes[0]).all() else None

        for (active, width), steps in groupby(range(len(self.tape.active)), key=kind):
            at = list(steps)
            yield active, width, range(at[0], at[-1] + 1)


# (sent, carry, batches of equal size) -> carry, over lanes
Walk = Callable[[Groups, Groups, Iterable[Batch]], Groups]
# (work, carry, width, lanes at work, steps) -> carry, perhaps in places that the next call writes
# to
Stretch = Callable[[Work, Groups, int | None, int, range], Groups]


def run_vmap(
    work: Work, carry: Groups, steps: int | None = None, by: Callable[[Work], Walk] | None = None
) -> Groups:
    """Step by step over all lanes at work, so many steps or all of them.

    `by` makes programs for the shapes that they meet.
    """

    def stretch(here: Work, carry: Groups, width: int | None, active: int, span: range) -> Groups:
        walk = here.walk if by is None else by(here)
        if width is None:
            return advance(here, carry, active, span, walk)
        return walk(here.sent, carry, here.read_on(span, lanes_in(carry), width))

    return run_plateaus(work, carry, steps, stretch, padded=by is not None)


def run_plateaus(
    work: Work,
    carry: Groups,
    steps: int | None,
    stretch: Stretch,
    padded: bool,
    places: Callable[[int], int] | None = None,
) -> Groups:
    """Plateau after plateau; finished lanes leave. Where a program for another number of lanes is
    dear, `places` says how many a program for so many at work should have: lanes that have finished
    go idly on in what is left over, their results put away.
    """
    finished, left = [], lanes_in(carry)
    for active, width, span in work.plateaus(padded):
        if active < left:
            # where they lie a recorded step goes on writing
            finished.append(copies(part(carry, active, left)))
            left = active
        room = places(active) if places else active
        carry = carry if room >= lanes_in(carry) else part(carry, 0, room)
        carry = stretch(work.head(lanes_in(carry)), carry, width, active, span[:steps])
        steps = None if steps is None else steps - len(span)
        if steps is not None and steps <= 0:
            break
    finished.append(copies(part(carry, 0, left)))
    return join(finished[::-1])


def advance(work: Work, carry: Groups, active: int, span: range, walk: Walk) -> Groups:
    """Steps in which lanes with batches of different sizes must go separately."""
    for step in span:
        moved, idle = _advance(work, carry, active, step, walk), part(carry, active, None)
        carry = join([moved, idle]) if lanes_in(idle) else moved
    return carry


def _advance(work: Work, carry: Groups, active: int, step: int, walk: Walk) -> Groups:
    sizes = work.tape.sizes[step, :active]
    moved: list[Groups | None] = [None] * active
    for size in sorted(set(sizes.tolist())):
        which = [lane for lane in range(active) if sizes[lane] == size]
        index = torch.tensor(which, device=work.tape.indices.device)
        sent = work.sent if work.shared else chosen(work.sent, index)
        after = walk(sent, chosen(carry, index), [work.read(step, index, size)])
        for at, lane in enumerate(which):
            moved[lane] = take(after, at)
    return stacked([lane for lane in moved if lane is not None])


def run_loop(work: Work, carry: Groups, steps: int | None = None) -> Groups:
    """Lane after lane, each through all its batches."""
    done = []
    for lane in range(lanes_in(carry)):
        own, sent = take(carry, lane), work.sent if work.shared else take(work.sent, lane)
        sizes = work.tape.sizes[:, lane]
        for step in range(int((sizes > 0).sum()))[:steps]:
            batch = work.read(step, slice(lane, lane + 1), int(sizes[step]))
            own = work.one(sent, own, Batch(*(tensor[0] for tensor in batch)))
        done.append(own)
    return stacked(done)
