"""The inputs of a network's layers in one call."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from feddkd.models.functional import Model
from feddkd.tensors import Tensors
from feddkd.trees import Tree


def layer_inputs(
    model: Model,
    params: Tensors,
    buffers: Tensors,
    x: Tree,
    key: Tensor | None,
    layers: frozenset[str],
) -> dict[str, list[Tensor]]:
    """Return the first inputs of some layers in evaluation mode, one for each time it is called."""
    found: dict[str, list[Tensor]] = {}

    def note(layer: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda module, inputs: found.setdefault(layer, []).append(inputs[0])

    # the skeleton belongs to this thread
    named = model.nets["eval"].named_modules()
    handles = [
        module.register_forward_pre_hook(note(name)) for name, module in named if name in layers
    ]
    try:
        model(params, buffers, x, mode="eval", key=key)
    finally:
        for handle in handles:
            handle.remove()
    return found
