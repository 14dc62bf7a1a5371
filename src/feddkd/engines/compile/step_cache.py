"""The steps of a fold traced once and then launched flat, batch after batch, so that nothing but
tensor operations is left of them. No bit changes.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from itertools import chain, groupby

from torch import Tensor
from torch.random import fork_rng
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_structure, tree_unflatten

from feddkd.engines.compile.simplify import trimmed
from feddkd.method import Batch, Fold
from feddkd.models.functional import Model
from feddkd.tensors import Groups

# steps of a kind after which it is traced: by then tracing, half a second the first time, would
# about have paid
PAYS = 500
Step = Callable[[Groups, Groups, Batch], Groups]  # (sent, carry, batch) -> carry


class Traces:
    """Traced steps by their kind.

    Inputs of other shapes must be of another kind, but for the batch's.
    """

    def __init__(self) -> None:
        self._steps: dict[Hashable, Callable[..., list[Tensor]]] = {}

    def clear(self) -> None:
        self._steps.clear()

    def learn(
        self, kind: Hashable, step: Step, sent: Groups, carry: Groups, batch: Batch
    ) -> Callable[..., list[Tensor]]:
        """The traced step; traced now, unless that has been done."""
        key = kind, batch.x.shape
        if key not in self._steps:
            flat, shape = tree_flatten(carry)
            self._steps[key] = trimmed(_flat(step, sent, shape), *tree_leaves(sent), *flat, *batch)
        return self._steps[key]

    def walk(
        self, kind: Hashable, step: Step, sent: Groups, carry: Groups, batches: Iterable[Batch]
    ) -> Groups:
        """Tensors lie side by side from the first step to the last: taking nested ones apart takes
        time, too.
        """
        given, (flat, shape) = tree_leaves(sent), tree_flatten(carry)
        for batch in batches:
            traced = self._steps.get((kind, batch.x.shape)) or self.learn(
                kind, step, sent, tree_unflatten(flat, shape), batch
            )
            flat = traced(*given, *flat, *batch)
        moved: Groups = tree_unflatten(flat, shape)
        return moved


class Practice:
    """Walks step by step, and what it has done often by traces."""

    def __init__(self) -> None:
        self._made: Counter[Hashable] = Counter()  # kind -> steps
        self._traces = Traces()
        self._untraced: set[Hashable] = set()  # kinds that cannot be: those that branch on numbers

    def walk(
        self, model: Model, client: Fold, sent: Groups, carry: Groups, batches: Iterable[Batch]
    ) -> Groups:
        step = partial(client.step, model)
        for _, alike in groupby(batches, key=lambda batch: len(batch.y)):
            carry = self._walk(client, step, sent, carry, alike)
        return carry

    def _walk(
        self, client: Fold, step: Step, sent: Groups, carry: Groups, alike: Iterator[Batch]
    ) -> Groups:
        """Over batches of equal size."""
        first = next(alike)
        kind, batches = (client, len(first.y), _form(sent), _form(carry)), chain((first,), alike)
        if self._made[kind] >= PAYS and self._can(kind, step, sent, carry, first):
            return self._traces.walk(kind, step, sent, carry, batches)
        for batch in batches:
            carry = step(sent, carry, batch)
            self._made[kind] += 1
        return carry

    def _can(self, kind: Hashable, step: Step, sent: Groups, carry: Groups, batch: Batch) -> bool:
        if kind not in self._untraced:
            try:
                # a network that draws by itself draws while it is traced, too
                with fork_rng(devices=[]):
                    self._traces.learn(kind, step, sent, carry, batch)
            except Exception:  # whatever it is, the step itself has worked all the time
                self._untraced.add(kind)
        return kind not in self._untraced


def _form(groups: Groups) -> Hashable:
    return tuple(
        (group, name, tensor.shape)
        for group, tensors in groups.items()
        for name, tensor in tensors.items()
    )


def _flat(step: Step, sent: Groups, shape: TreeSpec) -> Callable[..., list[Tensor]]:
    """A step of tensors side by side: what is sent, carry, batch -> carry."""
    given, parts = tree_structure(sent), len(Batch._fields)

    def side_by_side(*leaves: Tensor) -> list[Tensor]:
        at = given.num_leaves
        carry = tree_unflatten(leaves[at:-parts], shape)
        return shape.flatten_up_to(
            step(tree_unflatten(leaves[:at], given), carry, Batch(*leaves[-parts:]))
        )

    return side_by_side
