"""Random draws inside a network's `forward`, as functions of the step's key.

In the context `KeyedDraws(key)` torch's random functions (dropout in all its forms, `rand`,
`normal`, `bernoulli`, ...) take their numbers from `uniform(key, ...)` and not from a generator. So
a client draws the same numbers on every engine, also under vmap and in a recorded program. A
function that is not in the table FUNCTIONS still draws from a generator; then `proof.py` refuses
the network, with the layer's name.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from feddkd.models.keyed_generators import GENERATORS
from feddkd.models.keyed_layers import LAYERS
from feddkd.models.keyed_numbers import KeyedNumbers

FUNCTIONS: dict[str, Callable[..., Any]] = {**LAYERS, **GENERATORS}
# Python functions of torch.nn.functional that draw in their bodies; their bodies run in the context
COMPOSED = frozenset(
    {
        "dropout",
        "alpha_dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "feature_alpha_dropout",
        "gumbel_softmax",
        "multi_head_attention_forward",
        "rrelu",
    }
)


class KeyedDraws(KeyedNumbers, TorchFunctionMode):
    """A context in which draws follow a key, for one forward pass."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if isinstance(func, FunctionType):
            if name not in COMPOSED or func.__module__ != nn.functional.__name__:
                return func(*args, **kwargs)
            with self:
                return _body(func)(*args, **kwargs)
        keyed = FUNCTIONS.get(name)
        return func(*args, **kwargs) if keyed is None else keyed(self, func, *args, **kwargs)


@cache
def _body(function: FunctionType) -> FunctionType:
    """Return the function without its check for a mode that handles the call.

    The mode is handling it already.
    """
    unchecked = dict.fromkeys(
        ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"),
        lambda *_: False,
    )
    scope = {**function.__globals__, **unchecked}
    body = FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    body.__kwdefaults__ = function.__kwdefaults__
    return body


def dropout_layers(net: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """Yield a network's dropout layers, each with its stream: its number among the modules."""
    for stream, module in enumerate(net.modules()):
        if isinstance(module, _DropoutNd):
            yield stream, module


def announce_dropout(
    net: nn.Module, draws: Callable[[], KeyedDraws | None]
) -> list[RemovableHandle]:
    """Make each dropout layer of a network announce its draws before its call.

    It announces them to the context that `draws` returns at that moment.
    """

    def announce(stream: int, module: nn.Module, inputs: Any) -> None:
        current = draws()
        if current is not None:
            current.layer = stream if module.training and module.p else None

    return [
        module.register_forward_pre_hook(partial(announce, stream))
        for stream, module in dropout_layers(net)
    ]


@contextmanager
def keyed(net: nn.Module, key: Tensor) -> Iterator[KeyedDraws]:
    """Make an ordinary module draw the same numbers as its functional form with this key."""
    draws = KeyedDraws(key)
    hooks = announce_dropout(net, lambda: draws)
    try:
        with draws:
            yield draws
    finally:
        for hook in hooks:
            hook.remove()
