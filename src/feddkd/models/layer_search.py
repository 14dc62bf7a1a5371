"""The search for the layer of a network to which an error belongs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from feddkd.models.comparison import is_close
from feddkd.models.seeded_build import generator_states

Call = Callable[[], Any]


def differing_layer(net: nn.Module, call: Call, other: nn.Module, call_other: Call) -> str:
    """Return the name of the first layer with different outputs in two networks.

    `call` calls `net`, and `call_other` calls `other`. The name is empty if there is no such layer.
    """
    expected, actual = _outputs(net, call), _outputs(other, call_other)
    for name, output in expected.items():
        if name in actual and not is_close(output, actual[name]):
            return name
    return ""


def drawing_layer(net: nn.Module, call: Call, x: Tensor) -> str:
    """Return the name of the innermost layer that changes a global generator, or an empty text."""
    begun, moved = dict[str, Any](), list[str]()

    def before(name: str, *_: Any) -> None:
        begun[name] = generator_states(x)

    def after(name: str, *_: Any) -> None:
        if begun[name] != generator_states(x):
            moved.append(name)

    with _hooks(net, before, after):
        call()
    return next(iter(moved), "")  # inner layers end before the layers that contain them


def described_layer(net: nn.Module, name: str) -> str:
    """Return a layer's name and type in words; an empty name means the network itself."""
    return f"layer {name!r} ({type(net.get_submodule(name)).__name__})" if name else "the network"


def _outputs(net: nn.Module, call: Call) -> dict[str, Tensor]:
    """Return the first output of each layer in a call, if it is a tensor."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            outputs.setdefault(name, output.detach().clone())

    with _hooks(net, after=keep):
        call()
    return outputs


@contextmanager
def _hooks(
    net: nn.Module,
    before: Callable[..., None] = lambda *_: None,
    after: Callable[..., None] = lambda *_: None,
) -> Iterator[None]:
    """Call functions before and after each layer, with its name as the first argument."""
    handles = []
    for name, module in net.named_modules():
        handles.append(module.register_forward_pre_hook(partial(before, name)))
        handles.append(module.register_forward_hook(partial(after, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
