"""nn.LSTM, nn.GRU and nn.RNN in plain tensor operations, for torch.func.

torch's own functions have no vmap rule, and cuDNN's layers read the memory of their weights, which
tensors under torch.func do not show. The numbers are the same up to rounding.

    LSTM  i, f, o = sigmoid(a), g = tanh(a),  c <- f c + i g,  h <- o tanh(c), projected if asked
    GRU   r, z = sigmoid(a + b),  n = tanh(a + r b),  h <- (1 - z) n + z h
    RNN   h <- tanh or relu(a + b)

a = x W_ih^T + b_ih and b = h W_hh^T + b_hh are the parts of the input and of the state.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

State = tuple[Tensor, ...]  # (h,) or, of an LSTM, (h, c)
Step = Callable[[Tensor, Tensor, State, Tensor | None], State]  # (a, b, state, projection)


def run_layer(
    name: str, x: Tensor, state: State, weights: Sequence[Tensor], biases: bool, both: bool
) -> tuple[Tensor, State]:
    """Return the outputs of one layer and its state after the last step; x is (time, batch, ...).

    `state` has a row for each direction.
    """
    each = len(weights) // (1 + both)
    outputs, ends = [], []
    for way in range(1 + both):
        own = weights[way * each : (way + 1) * each]
        first = tuple(part[way] for part in state)
        output, end = _run_direction(name, x.flip(0) if way else x, first, own, biases)
        outputs.append(output.flip(0) if way else output)
        ends.append(end)
    last = tuple(torch.stack(parts) for parts in zip(*ends, strict=True))
    return torch.cat(outputs, -1), last


def _run_direction(
    name: str, x: Tensor, state: State, weights: Sequence[Tensor], biases: bool
) -> tuple[Tensor, State]:
    w_ih, w_hh, *others = weights
    b_ih, b_hh = others[:2] if biases else (None, None)
    projection = others[2 * biases] if len(others) > 2 * biases else None
    inputs, hidden = linear(x, w_ih, b_ih), []
    for a in inputs:
        state = STEPS[name](a, linear(state[0], w_hh, b_hh), state, projection)
        hidden.append(state[0])
    return torch.stack(hidden), state


def _lstm(a: Tensor, b: Tensor, state: State, projection: Tensor | None) -> State:
    i, f, g, o = (a + b).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return (h if projection is None else linear(h, projection)), c


def _gru(a: Tensor, b: Tensor, state: State, projection: Tensor | None) -> State:
    (a_r, a_z, a_n), (b_r, b_z, b_n) = a.chunk(3, -1), b.chunk(3, -1)
    z = (a_z + b_z).sigmoid()
    n = (a_n + (a_r + b_r).sigmoid() * b_n).tanh()
    return ((1 - z) * n + z * state[0],)


STEPS: dict[str, Step] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": lambda a, b, state, projection: ((a + b).tanh(),),
    "rnn_relu": lambda a, b, state, projection: ((a + b).relu(),),
}


def needs_plain_operations(tensors: Sequence[Any]) -> bool:
    """Return whether torch's own recurrent functions cannot compute with these tensors."""
    return any(is_laned(tensor) or (tensor.is_cuda and is_wrapped(tensor)) for tensor in tensors)


def is_wrapped(x: Tensor) -> bool:
    """Return whether torch.func transforms a tensor."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(x))


def is_laned(x: Tensor) -> bool:
    """Return whether a tensor has a batch dimension of vmap."""
    while is_wrapped(x):
        if torch._C._functorch.is_batchedtensor(x):
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return False
