"""The work of a fold over many lanes, and the two ways to do it that need no GPU."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor
from torch.func import vmap

from feddkd.engines.lanes import Store, Tape
from feddkd.method import Batch, Fold, Phase
from feddkd.models import Model
from feddkd.params import Groups


def take(groups: Groups, lane: int) -> Groups:
    """One lane of stacked groups."""
    return {group: {name: tensor[lane] for name, tensor in tensors.items()} for group, tensors in groups.items()}


def apart(groups: Groups, lanes: int) -> list[dict[str, dict[str, Tensor]]]:
    """All lanes of stacked groups, each for itself: one call a tensor, not one a lane."""
    rows: list[dict[str, dict[str, Tensor]]] = [{group: {} for group in groups} for _ in range(lanes)]
    for group, tensors in groups.items():
        for name, tensor in tensors.items():
            for row, own in zip(rows, tensor.unbind(), strict=True):
                row[group][name] = own
    return rows


def part(groups: Groups, start: int, stop: int | None) -> Groups:
    """Some lanes of stacked groups."""
    return {group: {name: tensor[start:stop] for name, tensor in tensors.items()} for group, tensors in groups.items()}


def join(parts: list[Groups]) -> Groups:
    """Lanes put back together."""
    if len(parts) == 1:
        return parts[0]
    return {g: {name: torch.cat([p[g][name] for p in parts]) for name in parts[0][g]} for g in parts[0]}


def stacked(many: list[Groups]) -> Groups:
    return {g: {name: torch.stack([one[g][name] for one in many]) for name in many[0][g]} for g in many[0]}


def chosen(groups: Groups, lanes: Tensor) -> Groups:
    return {group: {name: tensor[lanes] for name, tensor in tensors.items()} for group, tensors in groups.items()}


def lanes_in(groups: Groups) -> int:
    return next(len(tensor) for tensors in groups.values() for tensor in tensors.values())


Shapes = tuple[tuple[int, ...], ...]


def shapes(groups: Groups) -> Shapes:
    return tuple(tuple(tensor.shape) for tensors in groups.values() for tensor in tensors.values())


def grouped(kinds: Sequence[object]) -> list[list[int]]:
    """Positions of equal kinds, together."""
    return [[at for at, other in enumerate(kinds) if other == kind] for kind in dict.fromkeys(kinds)]


@dataclass(frozen=True)
class Work:
    """A fold over a tape: what is sent is the same for all lanes (`shared`), or has a lane axis of its own."""

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
        cut = tape.indices[step, lanes, :width], tape.share[step, lanes, :width], tape.keys[step, lanes]
        return self.store.read(*cut, self.dtype, self.phase.reads.random)

    def one(self, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        return self.client.step(self.model, sent, carry, batch)

    def many(self, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        return vmap(self.one, (None if self.shared else 0, 0, 0))(sent, carry, batch)

    def plateaus(self) -> Iterator[tuple[int, range]]:
        """(lanes at work, steps for which it is those)."""
        for active, steps in groupby(range(len(self.tape.active)), key=lambda step: self.tape.active[step]):
            at = list(steps)
            yield active, range(at[0], at[-1] + 1)


Step = Callable[[Groups, Groups, Batch], Groups]  # (sent, carry, batch) -> carry, over lanes


def run_vmap(work: Work, carry: Groups, steps: int | None = None, by: Callable[[Work], Step] | None = None) -> Groups:
    """Step by step over all lanes at work; finished lanes leave. `by` makes programs for the shapes they meet: batches are padded
    to one width, so that a partial batch is no new shape."""
    finished: list[Groups] = []
    width = None if by is None else work.tape.indices.shape[2]
    for active, span in work.plateaus():
        if active < lanes_in(carry):
            finished.append(part(carry, active, None))
            carry = part(carry, 0, active)
        here = work.head(active)
        for step in span[:steps]:
            carry = advance(here, carry, step, active, here.many if by is None else by(here), width)
        if steps is not None:
            break
    return join([carry, *reversed(finished)])


def advance(work: Work, carry: Groups, step: int, active: int, call: Step, width: int | None = None) -> Groups:
    """One step of all lanes. Batch norm feels padding, so there lanes with batches of different sizes go separately."""
    sizes = work.tape.sizes[step, :active]
    if not work.model.norm_names or (sizes == sizes[0]).all():
        padded = int(sizes.max()) if width is None or work.model.norm_names else width
        return call(work.sent, carry, work.read(step, slice(0, active), padded))
    moved: list[Groups | None] = [None] * active
    for size in sorted(set(sizes.tolist())):
        which = [lane for lane in range(active) if sizes[lane] == size]
        index = torch.tensor(which, device=work.tape.indices.device)
        sent = work.sent if work.shared else chosen(work.sent, index)
        after = call(sent, chosen(carry, index), work.read(step, index, size))
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
