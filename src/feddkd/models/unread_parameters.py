"""Refusal of parameters that a network does not read from the module that registers them.

A list, a dict or a closure may hold a layer or a parameter. The functional form cannot put a
client's numbers there: it would always compute with the first numbers, and in the first round the
results would still be equal. So the parameters that take part in a call are checked.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from feddkd.errors import InputError
from feddkd.tensors import Tensors


class RefuseUnread(TorchFunctionMode):
    """A context in which a computation with a trainable nn.Parameter raises an InputError.

    The functional form gives every trained tensor as a plain tensor.
    """

    def __init__(self, params: Tensors) -> None:
        super().__init__()
        self.params = params

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "__get__":  # reading a shape is allowed
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, nn.Parameter) and (leaf.requires_grad or leaf.is_meta):
                    self._refuse(leaf)
        return func(*args, **kwargs)

    def _refuse(self, stray: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            alike = [name for name, param in self.params.items() if _is_equal(param, stray)]
        parameter = repr(alike[0]) if alike else f"of shape {tuple(stray.shape)}"
        raise InputError(
            f"the network computes with its parameter {parameter} from a list, a dict or a function"
            " that holds it: take it from the module where it is registered, and keep layers in"
            " nn.ModuleList and parameters in nn.ParameterList"
        )


def _is_equal(param: Tensor, stray: Tensor) -> bool:
    return (
        not stray.is_meta
        and param.shape == stray.shape
        and torch.equal(param, stray.detach().to(param.device, param.dtype))
    )
