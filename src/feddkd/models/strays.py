"""Parameters that a network uses without taking them from the place where they are registered.

A list, a dict or a closure may hold a layer or a parameter. The functional form cannot put a
client's numbers there: it would compute with the first numbers for ever, and at first nothing
differs. So it is asked which parameters take part in a call.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from feddkd.errors import InputError
from feddkd.tensors import Tensors


class NoStrays(TorchFunctionMode):
    """A context in which every number that is trained arrives as a plain tensor; an nn.Parameter in
    it is an InputError.
    """

    def __init__(self, params: Tensors) -> None:
        super().__init__()
        self.params = params

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "__get__":  # to read a shape is no computation
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, nn.Parameter) and (leaf.requires_grad or leaf.is_meta):
                    self._refuse(leaf)
        return func(*args, **kwargs)

    def _refuse(self, stray: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            alike = [name for name, own in self.params.items() if _same_numbers(own, stray)]
        called = repr(alike[0]) if alike else f"of shape {tuple(stray.shape)}"
        raise InputError(
            f"the network computes with its parameter {called} from a list, a dict or a function"
            " that holds it: take it from the module where it is registered, and keep layers in"
            " nn.ModuleList and parameters in nn.ParameterList"
        )


def _same_numbers(own: Tensor, stray: Tensor) -> bool:
    return (
        not stray.is_meta
        and own.shape == stray.shape
        and torch.equal(own, stray.detach().to(own.device, own.dtype))
    )
