"""Dropout, attention and recurrent layers whose draws follow the key.

Each function replaces one of torch's: (numbers of the key, torch's function, arguments) -> result.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from feddkd.models.keyed_numbers import KeyedNumbers
from feddkd.models.recurrent import is_laned, needs_plain_operations, run_layer


def drop(x: Tensor, p: float, numbers: Tensor) -> Tensor:
    """Return x with zeros where the number is below p, and the rest scaled to keep the mean."""
    kept = (numbers >= p).to(x.dtype)
    return x * kept if p == 1 else x * kept / (1 - p)


def _dropout(draws: KeyedNumbers, func: Any, input: Tensor, p: float, train: bool) -> Tensor:
    if not train or not p:
        return input
    return _replaced(func, input, drop(input, p, draws.uniform(input.shape)))


def _feature_dropout(
    draws: KeyedNumbers, func: Any, input: Tensor, p: float, train: bool
) -> Tensor:
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
    draws: KeyedNumbers,
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
    draws: KeyedNumbers,
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


def _recurrent(draws: KeyedNumbers, func: Any, *args: Any) -> Any:
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
    draws: KeyedNumbers,
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


LAYERS: dict[str, Callable[..., Any]] = {
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
}
