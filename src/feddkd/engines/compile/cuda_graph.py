"""Functions of tensors in fixed places, recorded as CUDA graphs.

The inputs of a replay are copied into place, and its results lie in fixed places, too. A replay
costs one launch, however many operations the function has.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

WARM_UP = 3  # calls before a recording
Compiler = Callable[..., Callable[..., Any]]  # (function, *example inputs) -> compiled function


def fill(places: Any, tensors: Any) -> None:
    """Copy nested tensors to their fixed places.

    Only this and the carry of a recording write to tensors.
    """
    leaves, tree = tree_flatten(places)
    # matched by name, since mappings may have another order
    fill_all(leaves, tree.flatten_up_to(tensors))


def fill_all(places: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy tensors to their fixed places, all of one type in one launch."""
    by_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for place, tensor in zip(places, tensors, strict=True):
        targets, sources = by_type.setdefault(place.dtype, ([], []))
        targets.append(place)
        sources.append(tensor)
    for targets, sources in by_type.values():
        torch._foreach_copy_(targets, sources)


def copies(nested: Any) -> Any:
    """Return copies that no later replay overwrites."""
    leaves, tree = tree_flatten(nested)
    fresh = [torch.empty_like(leaf) for leaf in leaves]
    fill_all(fresh, leaves)
    return tree_unflatten(fresh, tree)


def new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def warmed_up(function: Callable[[], Any], device: torch.device) -> Any:
    """Call the function some times on a separate stream, as a recording requires.

    Return the last result.
    """
    stream = new_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            result = function()
    torch.cuda.current_stream(device).wait_stream(stream)
    return result


def record_graph(function: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """Return the launches of a function as a graph; they are not executed yet.

    If a launch fails, torch leaves the recording's stream current and its memory open: then every
    later recording would fail, too.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool):
            function()
    except BaseException:
        torch.cuda.set_stream(stream)
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(stream.device.index, pool)
        raise
    return graph


class Replay:
    """A function of tensors in fixed places, as a CUDA graph.

    Its results are written to places outside the graph's memory: graphs can share that memory, and
    results stay until this graph is replayed.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        places: tuple[Any, ...],
        fuse: Compiler | None,
        pool: Any,
    ) -> None:
        leaves, inputs = tree_flatten(places)
        result_trees: list[Any] = []

        # of plain tensors, so that a compiler sees nothing else
        def flat(*leaves: Tensor) -> list[Tensor]:
            results, tree = tree_flatten(function(*tree_unflatten(leaves, inputs)))
            result_trees.append(tree)
            return results

        call = fuse(flat, *leaves) if fuse else flat
        warm = warmed_up(lambda: call(*leaves), leaves[0].device)
        results = [torch.empty_like(tensor) for tensor in warm]
        self.results = tree_unflatten(results, result_trees[0])
        self.graph = record_graph(lambda: fill_all(results, call(*leaves)), pool)

    def __call__(self) -> Any:
        self.graph.replay()
        return self.results
