"""Find out, on a few examples, whether a network couples the examples of a batch.

It does if an example's output or gradient depends on the other examples, as with batch norm, or if
the network's buffers do. An engine may then not fill a small batch with further examples.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import grad

from feddkd.models.comparison import is_close
from feddkd.models.functional import Mode, Model, Output, arguments
from feddkd.models.keyed_draws import keyed
from feddkd.tensors import Tensors, to
from feddkd.trees import Tree, cat, first_tensor, map_tensors, take

KEYS = 4  # a draw may decide whether examples are mixed
FAR = 4.0  # further examples are larger than the others by this factor, in both directions
# (float64, larger than the rounding errors of parts in float32), and for networks that only compute
# in the type of the run, larger than the errors of libraries that use other kernels
STRICT, LOOSE = 1e-6, 1e-2


def couples_examples(
    model: Model, params: Tensors, buffers: Tensors, net: nn.Module, x: Tree, mode: Mode
) -> bool:
    """Return whether further examples change what the network computes of the others.

    That is: their outputs, their gradient, or the buffers.

    `net` is the module with the same numbers. A network that fails in a trial counts as one that
    couples.
    """
    try:
        drawn = _drawn_shapes(net, x) if mode == "train" else []
    except Exception:
        return True
    count = len(first_tensor(x))
    if any(not shape or shape[0] % count for shape in drawn):  # not of single examples
        return True
    keys = KEYS if drawn else 1
    own_type = next(tensor.dtype for tensor in params.values())
    for dtype, tolerance in ((torch.float64, STRICT), (own_type, LOOSE)):
        try:
            return not all(_trials(model, params, buffers, x, mode, dtype, tolerance, keys))
        except Exception:  # some networks compute in one type only
            continue
    return True


def _drawn_shapes(net: nn.Module, x: Tree) -> list[tuple[int, ...]]:
    """Return the shapes of the random numbers that the network draws."""
    net.train()
    with keyed(net, torch.tensor(0, device=first_tensor(x).device)) as draws:
        args, kwargs = arguments(map_tensors(Tensor.clone, x))
        net(*args, **kwargs)
    return draws.shapes


def _trials(
    model: Model,
    params: Tensors,
    buffers: Tensors,
    x: Tree,
    mode: Mode,
    dtype: torch.dtype,
    tolerance: float,
    keys: int,
) -> Iterator[bool]:
    """Yield whether the network computes the same of a few examples, alone and before others."""
    first = first_tensor(x)
    model = model.on(first.device, dtype)
    params, buffers = to(params, first.device, dtype), to(buffers, first.device, dtype)
    half = len(first) // 2
    few, others = (_typed(take(x, part), dtype) for part in (slice(half, None), slice(half)))
    more = cat([few, others, *(map_tensors(partial(_scaled, by), few) for by in (FAR, -FAR))])
    for number in range(keys):
        key = torch.tensor(number, device=first.device)
        call = partial(model, buffers=buffers, mode=mode, key=key)
        yield _is_alike(call(params, x=few), call(params, x=more), tolerance)

    def loss(params: Tensors, x: Tree) -> Tensor:
        return call(params, x=x).logits[: len(first) - half].square().sum()

    slopes = [grad(loss)(params, part) for part in (few, more)]
    largest = max(
        float(torch.linalg.vector_norm(slope, torch.inf))
        for slope in slopes[0].values()
        if slope.numel()
    )
    yield all(
        is_close(slope, slopes[1][name], tolerance, least=1e-2 * largest)
        for name, slope in slopes[0].items()
    )


def _typed(x: Tree, dtype: torch.dtype) -> Tree:
    return map_tensors(lambda part: part.to(dtype) if part.is_floating_point() else part, x)


def _scaled(factor: float, x: Tensor) -> Tensor:
    return factor * x if x.is_floating_point() else x


def _is_alike(few: Output, more: Output, tolerance: float) -> bool:
    return is_close(few.logits, more.logits[: len(few.logits)], tolerance) and all(
        is_close(buffer, more.buffers[name], tolerance) for name, buffer in few.buffers.items()
    )
