"""Tracing of a step over many lanes to one flat graph of tensor operations.

Convolutions are rewritten as patches x bmm. Under vmap a convolution with a weight for each lane
becomes a grouped convolution, which is slow in the libraries. With the images cut into patches (a
copy) it is one batched matrix product over the lanes, and so are both of its gradients. Tracing
works under vmap and grad, needs only a network of tensor operations, and gives torch.compile a
graph that it can fuse as a whole.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._functorch.compile_utils import fx_graph_cse
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import fold, pad
from torch.utils._pytree import tree_map

from feddkd.engines.choice_cache import keep_compiled_programs
from feddkd.engines.compile.fusing import fusing
from feddkd.process_lock import PROCESS_LOCK

aten = torch.ops.aten


def traced(function: Callable[..., Any], *example: Any) -> GraphModule:
    """Return the function as a graph for inputs of the example's shapes."""
    table: dict[Any, Callable[..., Any]] = {
        aten.convolution.default: _convolution,
        aten.convolution_backward.default: _convolution_backward,
    }
    # detached, so that a tensor that is given twice is two inputs of the graph
    example = tree_map(torch.detach, example)
    # one fake mode for all operations; without it each operation would make one
    # the tracer changes torch.nn.Module for all threads
    with PROCESS_LOCK, tracing(TracingContext(FakeTensorMode())):
        module = make_fx(lambda *inputs: function(*inputs), decomposition_table=table)(*example)
    # forward and backward read the same patches: cut them once
    graph = fx_graph_cse(module.graph)
    graph.set_codegen(module.graph._codegen)  # it flattens nested inputs
    module.graph = graph
    return module


def compiled(
    function: Callable[..., Any], *example: Any, channels_last: bool = False, kernels: bool = False
) -> Callable[..., Any]:
    """Return the traced function, fused by torch.compile.

    `channels_last` gives images the memory layout that cuDNN's convolutions need. `kernels` uses
    the Triton kernels of this package for convolutions, with the pooling and ReLU that follow them.
    """

    def with_fusing(*inputs: Any) -> Any:
        with fusing() if kernels else nullcontext():
            return function(*inputs)

    keep_compiled_programs()
    options: dict[str, Any] = {"force_layout_optimization": True} if channels_last else {}
    module = settle_numbers(traced(with_fusing, *example))
    result: Callable[..., Any] = torch.compile(
        module, dynamic=False, fullgraph=True, options=options
    )
    return result


@torch.library.custom_op("feddkd::settled", mutates_args=())
def settled(x: Tensor) -> Tensor:
    """Return a copy of x in memory.

    It makes a compiler store x once. Without it, a compiler computes x nine times for the patches
    that read it.
    """
    return x.clone(memory_format=torch.contiguous_format)


@settled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def settle_numbers(module: GraphModule) -> GraphModule:
    """Store the numbers that are computed in float64, and return the module.

    These are one number for each lane, for example Adam's corrections of bias. If they are not
    stored, a compiler computes them, with their powers, again for every weight, which took VGG-9 a
    quarter of its step.
    """
    for node in module.graph.find_nodes(op="call_function", target=aten._to_copy.default):
        (source,), made = node.args, node.meta["val"]
        if not isinstance(source, Node) or made.dim() > 1:
            continue
        if source.meta["val"].dtype == torch.float64 != made.dtype:
            with module.graph.inserting_after(node):
                out = module.graph.call_function(torch.ops.feddkd.settled.default, (node,))
            node.replace_all_uses_with(out, delete_user_cb=lambda user, out=out: user is not out)
    module.recompile()
    return module


def _is_laned(x: Tensor, transposed: bool, groups: int) -> bool:
    """Return whether a convolution is one over lanes, which vmap has made its groups."""
    return groups > 1 and not transposed and x.dim() == 4


def _convolution(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Any:
    if not _is_laned(x, transposed, groups):
        return NotImplemented
    patches, (height, width) = _patches(x, w, stride, padding, dilation, groups)
    out = torch.bmm(patches, _aligned(w.reshape(groups, len(w) // groups, -1)).transpose(1, 2))
    out = out.reshape(groups, len(x), height, width, -1).permute(1, 0, 4, 2, 3)
    out = out.reshape(len(x), -1, height, width)
    return out if bias is None else out + bias[:, None, None]


def _convolution_backward(
    slope: Tensor,
    x: Tensor,
    w: Tensor,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    wanted: list[bool],
) -> Any:
    if not _is_laned(x, transposed, groups):
        return NotImplemented
    batch, (height, width) = len(x), slope.shape[2:]
    rows = slope.reshape(batch, groups, -1, height, width).permute(1, 0, 3, 4, 2)
    rows = rows.reshape(groups, batch * height * width, -1)
    to_x = to_w = None
    if wanted[1]:
        product = _long_product(rows, _patches(x, w, stride, padding, dilation, groups)[0], batch)
        to_w = product[..., : w[0].numel()].reshape(w.shape)
    if wanted[0]:
        spread = torch.bmm(rows, w.reshape(groups, rows.shape[2], -1))
        spread = spread.reshape(groups, batch, height, width, *w.shape[1:])
        to_x = _put_back(spread, x, stride, padding, dilation)
    return to_x, to_w, slope.sum((0, 2, 3)) if wanted[2] else None


def _long_product(rows: Tensor, patches: Tensor, batch: int) -> Tensor:
    """Return rows^T patches.

    It is a small result of a very long sum, which is cut into pieces to give the whole GPU work.
    """
    pieces = next(count for count in (16, 8, 4, 2, 1) if batch % count == 0)
    left, right = (t.reshape(len(t) * pieces, -1, t.shape[2]) for t in (rows, patches))
    products = torch.bmm(left.transpose(1, 2), right)
    return products.reshape(len(rows), pieces, rows.shape[2], -1).sum(1)


def _patches(
    x: Tensor, w: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> tuple[Tensor, tuple[int, int]]:
    """Return the inputs of every position of the output, and the output's height and width.

    The shape is (groups, batch x height x width, channels x kernel).
    """
    batch, _, *sides = x.shape
    out = [
        (sides[d] + 2 * padding[d] - dilation[d] * (w.shape[2 + d] - 1) - 1) // stride[d] + 1
        for d in (0, 1)
    ]
    x = settled(x)
    padded = pad(x, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else x
    padded = padded.reshape(batch, groups, -1, *padded.shape[2:])
    for d in (0, 1):  # a view: two more axes that run over the kernel
        padded = padded.unfold(3 + d, dilation[d] * (w.shape[2 + d] - 1) + 1, stride[d])
        padded = padded[..., :: dilation[d]]
    patches = padded.permute(1, 0, 3, 4, 2, 5, 6).reshape(groups, batch * out[0] * out[1], -1)
    return _aligned(patches), (out[0], out[1])


def _aligned(rows: Tensor) -> Tensor:
    """Return the rows padded with zeros to a multiple of eight, as matrix units need them."""
    return pad(rows, (0, -rows.shape[-1] % 8))


def _put_back(
    spread: Tensor, x: Tensor, stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    """Return the transpose of `_patches`: the sum of the gradients of the patches at each input.

    `spread` is (groups, batch, h, w, c, kh, kw).
    """
    groups, batch, height, width, channels, *kernel = spread.shape
    if list(stride) != [1, 1]:
        columns = spread.permute(1, 0, 4, 5, 6, 2, 3).reshape(batch, -1, height * width)
        sizes = map(tuple, (x.shape[2:], kernel, dilation, padding, stride))
        return fold(columns, *sizes)
    sides = [x.shape[2 + d] + 2 * padding[d] for d in (0, 1)]
    total = None
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            top, left = i * dilation[0], j * dilation[1]
            piece = spread[..., i, j].permute(1, 0, 4, 2, 3)
            piece = pad(piece, (left, sides[1] - width - left, top, sides[0] - height - top))
            total = piece if total is None else total + piece
    assert total is not None
    whole: Tensor = settled(total.reshape(batch, groups * channels, *sides))
    return whole[..., padding[0] : sides[0] - padding[0], padding[1] : sides[1] - padding[1]]
