"""Pure functions of tensors in fixed places, recorded as CUDA graphs: what a replay reads is copied
into place, and its results lie in fixed places, too. Replaying costs one launch, whatever the
function is made of.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

WARM_UP = 3
Compiler = Callable[..., Callable[..., Any]]  # (function, *example inputs) -> the function, fused


def fill(places: Any, tensors: Any) -> None:
    """Copy tensors to where they belong: with the recordings' carry the only place where tensors
    are written to.
    """
    leaves, shape = tree_flatten(places)
    # by name: the order in which a mapping was put together does not count
    fill_all(leaves, shape.flatten_up_to(tensors))


def fill_all(places: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """All copies of a type in one launch."""
    by_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for place, tensor in zip(places, tensors, strict=True):
        mine, theirs = by_type.setdefault(place.dtype, ([], []))
        mine.append(place)
        theirs.append(tensor)
    for mine, theirs in by_type.values():
        torch._foreach_copy_(mine, theirs)


def copies(tree: Any) -> Any:
    """Results that no later replay writes over."""
    leaves, shape = tree_flatten(tree)
    fresh = [torch.empty_like(leaf) for leaf in leaves]
    fill_all(fresh, leaves)
    return tree_unflatten(fresh, shape)


def new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def in_peace(function: Callable[[], Any], device: torch.device) -> Any:
    """Warm up on a stream of its own, as recording asks for; returns the last result."""
    calm = new_stream(device)
    calm.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(calm):
        for _ in range(WARM_UP):
            result = function()
    torch.cuda.current_stream(device).wait_stream(calm)
    return result


def recorded(function: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """What the function launches, as a graph; it is not carried out yet."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        function()
    return graph


class Replay:
    """A function of tensors in fixed places as a CUDA graph. Its results are written to places
    outside the graph's memory: so graphs can share that memory, and results stay until this very
    graph is replayed.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        places: tuple[Any, ...],
        fuse: Compiler | None,
        pool: Any,
    ) -> None:
        leaves, inputs = tree_flatten(places)
        shapes: list[Any] = []  # how results are nested

        # of plain tensors: a compiler need not look at anything else
        def flat(*leaves: Tensor) -> list[Tensor]:
            results, shape = tree_flatten(function(*tree_unflatten(leaves, inputs)))
            shapes.append(shape)
            return results

        call = fuse(flat, *leaves) if fuse else flat
        results = [
            torch.empty_like(tensor) for tensor in in_peace(lambda: call(*leaves), leaves[0].device)
        ]
        self.results = tree_unflatten(results, shapes[0])
        self.graph = recorded(lambda: fill_all(results, call(*leaves)), pool)

    def __call__(self) -> Any:
        self.graph.replay()
        return self.results
