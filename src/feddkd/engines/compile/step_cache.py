"""Steps of a fold, traced once and then run on flat lists of tensors.

Only tensor operations are left of a traced step. Tracing changes no bit of the results.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from itertools import chain, groupby

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_structure, tree_unflatten

from feddkd.engines.compile.simplify import trimmed
from feddkd.method import Batch, Fold
from feddkd.models.functional import Model
from feddkd.tensors import Groups

# A kind of step is traced after this number of steps: by then the time for tracing, half a second
# the first time, would about have been saved.
TRACE_AFTER = 500
Step = Callable[[Groups, Groups, Batch], Groups]  # (sent, carry, batch) -> carry


class TracedSteps:
    """Traced steps by their kind.

    Inputs of other shapes must have another kind; the shape of the batch may vary.
    """

    def __init__(self) -> None:
        self._steps: dict[Hashable, Callable[..., list[Tensor]]] = {}

    def clear(self) -> None:
        self._steps.clear()

    def trace(
        self, kind: Hashable, step: Step, sent: Groups, carry: Groups, batch: Batch
    ) -> Callable[..., list[Tensor]]:
        """Return the traced step; trace it if this has not been done."""
        key = kind, _form(batch)
        if key not in self._steps:
            leaves, tree = tree_flatten(carry)
            flat_step = _flat(step, sent, tree, batch)
            self._steps[key] = trimmed(flat_step, *tree_leaves(sent), *leaves, *batch.tensors)
        return self._steps[key]

    def run(
        self, kind: Hashable, step: Step, sent: Groups, carry: Groups, batches: Iterable[Batch]
    ) -> Groups:
        """Return the carry after one step for each batch.

        The tensors stay in a flat list from the first step to the last, because to flatten nested
        ones takes time.
        """
        sent_leaves, (leaves, tree) = tree_leaves(sent), tree_flatten(carry)
        for batch in batches:
            traced = self._steps.get((kind, _form(batch))) or self.trace(
                kind, step, sent, tree_unflatten(leaves, tree), batch
            )
            leaves = traced(*sent_leaves, *leaves, *batch.tensors)
        result: Groups = tree_unflatten(leaves, tree)
        return result


class FoldTracer:
    """Runs folds step by step, and traces the kinds of step that it has run often."""

    def __init__(self) -> None:
        self._steps_done: Counter[Hashable] = Counter()  # kind -> steps
        self._traced = TracedSteps()
        # kinds that cannot be traced, because they branch on numbers
        self._untraceable: set[Hashable] = set()

    def run(
        self, model: Model, client: Fold, sent: Groups, carry: Groups, batches: Iterable[Batch]
    ) -> Groups:
        """Return the carry after one step for each batch."""
        step = partial(client.step, model)
        for _, equal in groupby(batches, key=lambda batch: len(batch.share)):
            carry = self._run_equal(client, step, sent, carry, equal)
        return carry

    def _run_equal(
        self, client: Fold, step: Step, sent: Groups, carry: Groups, batches: Iterator[Batch]
    ) -> Groups:
        """Run the steps for batches of equal size."""
        first = next(batches)
        kind = client, len(first.share), _shapes(sent), _shapes(carry)
        remaining = chain((first,), batches)
        often = self._steps_done[kind] >= TRACE_AFTER
        if often and self._can_trace(kind, step, sent, carry, first):
            return self._traced.run(kind, step, sent, carry, remaining)
        for batch in remaining:
            carry = step(sent, carry, batch)
            self._steps_done[kind] += 1
        return carry

    def _can_trace(
        self, kind: Hashable, step: Step, sent: Groups, carry: Groups, batch: Batch
    ) -> bool:
        if kind not in self._untraceable:
            try:
                self._traced.trace(kind, step, sent, carry, batch)
            except Exception:  # any error: the step itself works without a trace
                self._untraceable.add(kind)
        return kind not in self._untraceable


def _shapes(groups: Groups) -> Hashable:
    return tuple(
        (group, name, tensor.shape)
        for group, tensors in groups.items()
        for name, tensor in tensors.items()
    )


def _form(batch: Batch) -> Hashable:
    """Return the shapes of a batch."""
    if isinstance(batch.x, Tensor):
        return batch.x.shape
    return tuple(tensor.shape for tensor in batch.tensors)


def _flat(step: Step, sent: Groups, tree: TreeSpec, batch: Batch) -> Callable[..., list[Tensor]]:
    """Return the step as a function of flat tensors: (*sent, *carry, *batch) -> carry."""
    inputs = tree_structure((sent, tree_unflatten([0] * tree.num_leaves, tree), batch))

    def flat_step(*leaves: Tensor) -> list[Tensor]:
        return tree.flatten_up_to(step(*tree_unflatten(leaves, inputs)))

    return flat_step
