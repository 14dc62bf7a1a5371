"""`grad`: torch.func's, by ordinary autograd on a CPU where no transform of torch.func is active.

The gradients are the same. Ordinary autograd computes them with less work for each operation, and
uses torch's own recurrent layers. On a GPU it has not been tried yet: there it stays torch.func's.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.func import grad as grad_of_func
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

# True while `grad` calls a function: a gradient in it is differentiated, too
_INSIDE: ContextVar[bool] = ContextVar("inside", default=False)


def grad(function: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    """Return the function that gives the gradient by the first argument.

    If `has_aux`, the function returns (value, aux), and the result is (gradient, aux).
    """

    def call(first: Any, *others: Any) -> Any:
        on_cpu = all(leaf.is_cpu for leaf in tree_leaves(first))
        if _is_transformed() or not on_cpu:
            return grad_of_func(function, has_aux=has_aux)(first, *others)
        inside = _INSIDE.set(True)
        try:
            return _by_autograd(function, has_aux, first, others)
        finally:
            _INSIDE.reset(inside)

    return call


def _is_transformed() -> bool:
    """Return whether the gradient is taken under vmap, by a tracer, or inside another gradient."""
    return (
        _INSIDE.get()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or _get_current_dispatch_mode() is not None
    )


def _by_autograd(
    function: Callable[..., Any], has_aux: bool, first: Any, others: tuple[Any, ...]
) -> Any:
    leaves, tree = tree_flatten(first)
    with torch.enable_grad():
        points = [leaf.detach().requires_grad_() for leaf in leaves]
        result = function(tree_unflatten(points, tree), *others)
        value, aux = result if has_aux else (result, None)
        if value.requires_grad:
            slopes = torch.autograd.grad(value, points, materialize_grads=True)
        else:
            slopes = tuple(map(torch.zeros_like, leaves))
    gradient = tree_unflatten(slopes, tree)
    return (gradient, tree_map(_detached, aux)) if has_aux else gradient


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
