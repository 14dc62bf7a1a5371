"""Trees of tensors: a tensor, a tuple of trees, or a dict of trees.

The inputs and the targets of examples are trees. All tensors of a tree have the examples as their
first axis.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Tree = Any  # Tensor | tuple[Tree, ...] | Mapping[str, Tree]


def map_tensors(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Return a tree of the same form, with function(tensors of that place) in each place."""
    if isinstance(tree, Tensor):
        return function(tree, *others)
    if isinstance(tree, Mapping):
        return {
            name: map_tensors(function, part, *(other[name] for other in others))
            for name, part in tree.items()
        }
    return tuple(map_tensors(function, *parts) for parts in zip(tree, *others, strict=True))


def tensors_of(tree: Tree) -> list[Tensor]:
    """Return all tensors of a tree, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, Mapping) else tree
    return [tensor for part in parts for tensor in tensors_of(part)]


def first_tensor(tree: Tree) -> Tensor:
    """Return the first tensor of a tree."""
    while not isinstance(tree, Tensor):
        tree = next(iter(tree.values() if isinstance(tree, Mapping) else tree))
    return tree


def take(tree: Tree, index: Any) -> Tree:
    """Return tensor[index] in each place: some examples."""
    if isinstance(tree, Tensor):
        return tree[index]
    return map_tensors(lambda tensor: tensor[index], tree)


def cat(trees: Sequence[Tree]) -> Tree:
    """Return one tree with the examples of all, one after the other."""
    return map_tensors(lambda *tensors: torch.cat(tensors), *trees)


def unbind(tree: Tree) -> Iterator[Tree]:
    """Yield the parts of a tree along the first axis; those of a tuple are plain tuples."""
    if isinstance(tree, Tensor):
        return iter(tree.unbind())
    if isinstance(tree, Mapping):
        columns = zip(*map(unbind, tree.values()), strict=True)
        return (dict(zip(tree, parts, strict=True)) for parts in columns)
    return zip(*map(unbind, tree), strict=True)


def named_tensors_of(name: str, tree: Tree) -> dict[str, Tensor]:
    """Return the tensors of a tree by their paths: `name` alone if the tree is one tensor."""
    if isinstance(tree, Tensor):
        return {name: tree}
    parts = tree if isinstance(tree, Mapping) else dict(enumerate(tree))
    named: dict[str, Tensor] = {}
    for key, part in parts.items():
        named |= named_tensors_of(f"{name}.{key}", part)
    return named


def kind_of(tree: Tree) -> Tree:
    """Return the shape and type of one example as text, in each place."""
    return map_tensors(lambda tensor: f"{tuple(tensor.shape[1:])} {tensor.dtype}", tree)


def kind_in_words(tree: Tree) -> str:
    """Return the shape and type of one example as one text."""
    kind = kind_of(tree)
    return kind if isinstance(kind, str) else repr(kind).replace("'", "")


def are_equal(a: Tree, b: Tree) -> bool:
    """Return whether two trees have the same form, shapes, types and numbers."""
    return bool(kind_of(a) == kind_of(b)) and all(
        torch.equal(x, y) for x, y in zip(tensors_of(a), tensors_of(b), strict=True)
    )
