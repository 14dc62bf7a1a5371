"""Finds convolutions in a network that can be fused with what follows them.

`fusing()` watches a network while it is traced: where the output of a convolution goes through 2x2
max pooling and ReLU, in either order, one operation replaces all of them. The unused convolution
stays in the graph and is removed with its other dead code. Convolutions of other kinds (strides,
groups) do not change.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import batch_norm, group_norm, max_pool2d, relu
from torch.overrides import TorchFunctionMode

from feddkd.engines.compile.fused_conv import Form, fused_convolution


class _Origin(NamedTuple):
    """The operations and inputs of an output; the output is kept, so that its id stays unique."""

    form: Form
    inputs: tuple[Tensor, Tensor, Tensor | None]
    output: Tensor


class fusing(TorchFunctionMode):  # noqa: N801  # a context, as torch.no_grad
    """A context in which convolutions are fused where possible."""

    def __init__(self) -> None:
        super().__init__()
        self.origins: dict[int, _Origin] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # without this, gradients get the memory layout of the images, which vmap does not know
        if args and function in NORMS:
            args = (args[0].contiguous(), *args[1:])
        if function is torch.conv2d:
            fused = _convolved(*args, **kwargs)
        else:
            fused = self._extended(function, args, kwargs)
        if fused is None:
            return function(*args, **kwargs)
        form, inputs = fused
        output = fused_convolution(form, *inputs)
        self.origins[id(output)] = _Origin(form, inputs, output)
        return output

    def _extended(self, function: Any, args: Any, kwargs: Any) -> tuple[Form, Any] | None:
        """Return a convolution extended by this operation; None if they cannot be fused."""
        origin = self.origins.get(id(args[0])) if args else None
        if origin is None:
            return None
        if function in RELUS and len(args) == 1 and not kwargs.get("inplace"):
            return origin.form._replace(relu=True), origin.inputs
        if function in POOLINGS and origin.form.pool == 1 and _halves(*args[1:], **kwargs):
            return origin.form._replace(pool=2), origin.inputs
        return None


Functions = tuple[Callable[..., Tensor], ...]
RELUS: Functions = (torch.relu, Tensor.relu, relu)
NORMS: Functions = (torch.batch_norm, batch_norm, torch.group_norm, group_norm)
POOLINGS: Functions = (torch.max_pool2d, max_pool2d)


def _convolved(
    input: Tensor,
    weight: Tensor,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Form, Any] | None:
    """Return a convolution as (form, inputs); None if it is of a kind that cannot be fused."""
    square = input.dim() == 4 and weight.shape[2] == weight.shape[3]
    known = not input.is_cuda or input.dtype in (torch.float32, torch.bfloat16)
    pads = {padding} if isinstance(padding, int | str) else set(padding)
    fits = len(pads) == 1 and pads <= set(range(weight.shape[2]))
    if not (square and known and fits and groups == 1 and _all(stride, 1) and _all(dilation, 1)):
        return None
    return Form(int(pads.pop())), (input, weight, bias)


def _halves(
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> bool:
    """Return whether a max pooling is over windows of 2 x 2."""
    plain = _all(padding, 0) and _all(dilation, 1) and not ceil_mode and not return_indices
    return plain and _all(kernel_size, 2) and (not stride or _all(stride, 2))


def _all(value: Any, wanted: int) -> bool:
    return all(each == wanted for each in ([value] if isinstance(value, int) else value))
