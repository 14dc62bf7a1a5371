"""Random draws inside a network's `forward`, as functions of the step's key.

In the context `KeyedDraws(key)` torch's random functions (dropout in all its forms, `rand`,
`normal`, `bernoulli`, ...) take their numbers from `uniform(key, ...)` and not from a generator. So
a client draws the same numbers on every engine, also under vmap and in a recorded program. A
function that is not in the table FUNCTIONS still draws from a generator; then `proof.py` refuses
the network, with the layer's name.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from feddkd.errors import InputError
from feddkd.models.recurrent import is_laned, needs_plain_operations, run_layer
from feddkd.randomness import uniform

# first stream of draws outside dropout layers; the stream of a dropout layer is its number among
# the modules
FREE = 1 << 20
# distance between the streams of a dropout layer's first, second, ... call in one forward pass
AGAIN = 1 << 21
LEAST = 2.0**-25  # half the step of `uniform`: added where a number must not be zero

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


class KeyedDraws(TorchFunctionMode):
    """A context in which draws follow a key, for one forward pass."""

    def __init__(self, key: Tensor | None) -> None:
        super().__init__()
        self.key = key
        self.count = 0  # draws outside dropout layers so far
        # the stream of the dropout layer whose module is about to draw
        self.layer: int | None = None
        self._calls: Counter[int] = Counter()

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

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """Return the next numbers in [0, 1).

        They belong to the stream of the dropout layer that is about to draw, if there is one.
        """
        if self.key is None:
            raise InputError(
                "this network draws random numbers, for dropout for example, so a call needs a key"
            )
        layer, self.layer = self.layer, None
        if layer is None:
            stream, self.count = FREE + self.count, self.count + 1
        else:
            stream = layer + AGAIN * self._calls[layer]
            self._calls[layer] += 1
        return uniform(self.key, tuple(shape), stream)

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Return numbers of mean 0 and deviation 1, float64, by Box and Muller's formula."""
        radius = (-2 * (self.uniform(shape).double() + LEAST).log()).sqrt()
        return radius * (2 * math.pi * self.uniform(shape).double()).cos()


def drop(x: Tensor, p: float, numbers: Tensor) -> Tensor:
    """Return x with zeros where the number is below p, and the rest scaled to keep the mean."""
    kept = (numbers >= p).to(x.dtype)
    return x * kept if p == 1 else x * kept / (1 - p)


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


# --- a function for each of torch's functions: (draws, torch's function, arguments) -> result


def _dropout(draws: KeyedDraws, func: Any, input: Tensor, p: float, train: bool) -> Tensor:
    if not train or not p:
        return input
    return _replaced(func, input, drop(input, p, draws.uniform(input.shape)))


def _feature_dropout(draws: KeyedDraws, func: Any, input: Tensor, p: float, train: bool) -> Tensor:
    if not train or not p:
        return input
    return _replaced(func, input, drop(input, p, draws.uniform(channels(input))))


def _replaced(func: Any, input: Tensor, result: Tensor) -> Tensor:
    """Return the result, written over the input if torch's function works in place."""
    return input.copy_(result) if func.__name__.endswith("_") else result


def channels(x: Tensor) -> tuple[int, ...]:
    """Return the shape of one number for each channel."""
    return (*x.shape[:2], *(1,) * (x.dim() - 2))


def _alpha_dropout(
    draws: KeyedDraws,
    func: Any,
    input: Tensor,
    p: float,
    train: bool,
    *,
    shape: Callable[[Tensor], Sequence[int]],
) -> Tensor:
    """Return a (x kept + alpha' (1 - kept)) + b, which keeps mean and variance.

    Klambauer et al., 2017, arXiv:1706.02515.
    """
    if not train or p == 0:
        return input
    alpha = 1.7580993408473766
    scale = 0.0 if p == 1 else 1 / math.sqrt((alpha**2 * p + 1) * (1 - p))
    kept = (draws.uniform(shape(input)) >= p).to(input.dtype)
    result = input * (scale * kept) + (kept - 1) * (alpha * scale) + alpha * scale * p
    return _replaced(func, input, result)


def _attention(
    draws: KeyedDraws,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return softmax(q k^T scale + mask) v, with dropout of the softmax's weights."""
    # torch's kernel for CPUs has no vmap rule
    if dropout_p == 0 and not (query.device.type == "cpu" and is_laned(query)):
        result: Tensor = func(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return result
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        scores = (
            scores.masked_fill(~attn_mask, -math.inf)
            if attn_mask.dtype == torch.bool
            else scores + attn_mask
        )
    # for a row with everything masked torch gives zeros, not NaN
    masked = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(masked, 0).softmax(-1).masked_fill(masked, 0)
    if dropout_p:
        weights = drop(weights, dropout_p, draws.uniform(weights.shape))
    return weights @ value


def _recurrent(draws: KeyedDraws, func: Any, *args: Any) -> Any:
    """Run the layers one by one, so that dropout between them follows the key.

    `args` are those that `nn.LSTM`, `nn.GRU` and `nn.RNN` pass to torch's function.
    """
    # with packed sequences (data, batch_sizes, hx, ...) replaces (input, hx, ...)
    packed = isinstance(args[3], list | tuple)
    x, more, tail = args[0], args[1 : 1 + packed], args[8 + packed :]
    hx, tensors, biases, layers, p, train, both = args[1 + packed : 8 + packed]
    plain = not packed and needs_plain_operations((x, *tensors))
    if not plain and (not train or p == 0 or layers == 1):
        return func(*args)
    each, ways, ends = len(tensors) // layers, 1 + both, []
    for layer in range(layers):
        x = drop(x, p, draws.uniform(x.shape)) if layer and train and p else x
        weights = tensors[layer * each : (layer + 1) * each]
        rows = slice(layer * ways, (layer + 1) * ways)
        first = hx[rows] if isinstance(hx, Tensor) else tuple(state[rows] for state in hx)
        if plain:
            x, *end = _plain_layer(func.__name__, x, first, weights, biases, both, *tail)
        else:
            x, *end = func(x, *more, first, weights, biases, 1, 0.0, train, both, *tail)
        ends.append(end)
    return x, *(torch.cat(states) for states in zip(*ends, strict=True))


def _plain_layer(
    name: str,
    x: Tensor,
    first: Any,
    weights: Sequence[Tensor],
    biases: bool,
    both: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Return what torch's function returns for one layer, computed in plain operations."""
    state = (first,) if isinstance(first, Tensor) else tuple(first)
    x = x.transpose(0, 1) if batch_first else x
    output, last = run_layer(name, x, state, weights, biases, both)
    return (output.transpose(0, 1) if batch_first else output), *last


def _rrelu(
    draws: KeyedDraws,
    func: Any,
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    *_: Any,
) -> Tensor:
    if not training:
        result: Tensor = func(input, lower, upper, False)  # draws nothing
        return result
    slope = lower + (upper - lower) * draws.uniform(input.shape).to(input.dtype)
    return _replaced(func, input, torch.where(input >= 0, input, input * slope))


def _made(numbers: Tensor, kind: Any = None, **kwargs: Any) -> Tensor:
    """Return the numbers in the type that a factory function was given."""
    return numbers.to(kwargs.get("dtype") or kind or torch.get_default_dtype())


def _size(args: Sequence[Any], kwargs: Any) -> Sequence[int]:
    size: Sequence[Any] = kwargs.get("size", args)
    return size[0] if len(size) == 1 and not isinstance(size[0], int) else size


def _rand(draws: KeyedDraws, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    return _made(draws.uniform(_size(args, kwargs)), **kwargs)


def _randn(draws: KeyedDraws, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    return _made(draws.normal(_size(args, kwargs)), **kwargs)


def _rand_like(draws: KeyedDraws, func: Any, input: Tensor, **kwargs: Any) -> Tensor:
    return _made(draws.uniform(input.shape), input.dtype, **kwargs)


def _randn_like(draws: KeyedDraws, func: Any, input: Tensor, **kwargs: Any) -> Tensor:
    return _made(draws.normal(input.shape), input.dtype, **kwargs)


def _randint(draws: KeyedDraws, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Draw as torch.randint(high, size) or (low, high, size)."""
    size = kwargs.pop("size", None)
    *bounds, size = args if size is None else (*args, size)
    low, high = _bounds(bounds, kwargs)
    return _whole(draws, size, low, high, kwargs.get("dtype") or torch.int64)


def _randint_like(
    draws: KeyedDraws, func: Any, input: Tensor, *bounds: int, **kwargs: Any
) -> Tensor:
    low, high = _bounds(bounds, kwargs)
    return _whole(draws, input.shape, low, high, kwargs.get("dtype") or input.dtype)


def _bounds(bounds: Sequence[int], kwargs: Any) -> tuple[int, int]:
    """Return the bounds (low, high) of whole numbers, given by position or by name."""
    given = [kwargs.get("low", 0), *bounds]
    if "high" in kwargs:
        given.append(kwargs["high"])
    return given[-2], given[-1]


def _whole(
    draws: KeyedDraws, size: Sequence[int], low: int, high: int, dtype: torch.dtype
) -> Tensor:
    return (draws.uniform(size).double() * (high - low) + low).floor().to(dtype)


def _randperm(draws: KeyedDraws, func: Any, n: int, **kwargs: Any) -> Tensor:
    return draws.uniform((n,)).argsort(stable=True).to(kwargs.get("dtype") or torch.int64)


def _bernoulli(
    draws: KeyedDraws, func: Any, input: Tensor, p: float | None = None, **_: Any
) -> Tensor:
    return (draws.uniform(input.shape) < (input if p is None else p)).to(input.dtype)


def _normal(
    draws: KeyedDraws, func: Any, mean: Any = 0.0, std: Any = 1.0, size: Any = None, **kwargs: Any
) -> Tensor:
    """Draw as torch.normal, which takes tensors, or numbers and a size."""
    given = [value for value in (mean, std) if isinstance(value, Tensor)]
    shape = (mean + std).shape if given else size
    dtype = given[0].dtype if given else None
    result: Tensor = mean + std * _made(draws.normal(shape), dtype, **kwargs)
    return result


def _fill(numbers: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a tensor method that fills its tensor with these numbers."""

    def method(
        draws: KeyedDraws, func: Any, self: Tensor, *args: Any, generator: Any = None, **kwargs: Any
    ) -> Tensor:
        return self.copy_(numbers(draws, self, *args, **kwargs))

    return method


def _uniform_between(
    draws: KeyedDraws, self: Tensor, low: float = 0.0, high: float = 1.0, **kwargs: float
) -> Tensor:
    low, high = kwargs.get("from", low), kwargs.get("to", high)
    return draws.uniform(self.shape).to(self.dtype) * (high - low) + low


def _normal_around(draws: KeyedDraws, self: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return draws.normal(self.shape) * std + mean


def _exponential(draws: KeyedDraws, self: Tensor, lambd: float = 1.0) -> Tensor:
    return -(draws.uniform(self.shape).double() + LEAST).log() / lambd


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("dropout", "dropout_"), _dropout),
    **dict.fromkeys(("feature_dropout", "feature_dropout_"), _feature_dropout),
    **dict.fromkeys(
        ("alpha_dropout", "alpha_dropout_"), partial(_alpha_dropout, shape=lambda x: x.shape)
    ),
    **dict.fromkeys(
        ("feature_alpha_dropout", "feature_alpha_dropout_"), partial(_alpha_dropout, shape=channels)
    ),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("rrelu", "rrelu_"), _rrelu),
    "rand": _rand,
    "randn": _randn,
    "rand_like": _rand_like,
    "randn_like": _randn_like,
    "randint": _randint,
    "randint_like": _randint_like,
    "randperm": _randperm,
    "bernoulli": _bernoulli,
    "bernoulli_": _fill(lambda draws, self, p=0.5: draws.uniform(self.shape) < p),
    "normal": _normal,
    "normal_": _fill(_normal_around),
    "uniform_": _fill(_uniform_between),
    "exponential_": _fill(_exponential),
}


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
