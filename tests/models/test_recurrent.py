"""Recurrent layers in plain operations compute what torch's own functions compute, and have a vmap
rule.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from feddkd.models import keyed_layers
from feddkd.models.keyed_draws import KeyedDraws

KEY = torch.tensor(7)
LAYERS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn, tanh": nn.RNN,
    "rnn, relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two layers with dropout": {"num_layers": 2, "dropout": 0.4},
    "both ways": {"bidirectional": True, "num_layers": 2},
    "no bias": {"bias": False},
    "batch first": {"batch_first": True, "bidirectional": True},
}
PROJECTED = ("lstm", {"proj_size": 2, "num_layers": 2, "bidirectional": True})
CASES = [(name, options) for name in LAYERS for options in OPTIONS.values()] + [PROJECTED]


def made(name: str, options: dict[str, Any]) -> nn.RNNBase:
    torch.manual_seed(0)
    return LAYERS[name](4, 5, **options).double()


def loss(net: nn.Module, params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return a number that depends on all outputs and all last states."""
    with KeyedDraws(KEY):
        output, state = functional_call(net, params, (x,))
    last = [part.pow(3).sum() for part in (state if isinstance(state, tuple) else (state,))]
    total: Tensor = output.pow(2).sum() + torch.stack(last).sum()
    return total


def gradient(net: nn.Module) -> Callable[[dict[str, Tensor], Tensor], dict[str, Tensor]]:
    return grad(lambda params, x: loss(net, params, x))


@pytest.mark.parametrize(("name", "options"), CASES)
def test_lanes_of_a_recurrent_layer_are_what_torch_computes_one_by_one(
    name: str, options: dict[str, Any]
) -> None:
    net, x = made(name, options), torch.randn(3, 6, 4, dtype=torch.float64)
    params = {key: weight.detach() for key, weight in net.named_parameters()}
    lanes = {key: torch.stack([weight, weight + 0.1]) for key, weight in params.items()}
    together = vmap(gradient(net))(lanes, torch.stack([x, 2 * x]))
    for lane, seen in enumerate((x, 2 * x)):
        alone = gradient(net)({key: weight[lane] for key, weight in lanes.items()}, seen)
        for key, expected in alone.items():
            assert torch.allclose(together[key][lane], expected, rtol=1e-12, atol=1e-12), key


def test_what_a_gpu_computes_under_torch_func_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN cannot compute there, so plain operations do; here on a CPU."""
    net, x = made("lstm", {"num_layers": 2, "dropout": 0.4}), torch.randn(3, 6, 4).double()
    params = {key: weight.detach() for key, weight in net.named_parameters()}
    expected = gradient(net)(params, x)
    monkeypatch.setattr(keyed_layers, "needs_plain_operations", lambda tensors: True)
    plain = gradient(net)(params, x)
    assert all(torch.allclose(plain[key], expected[key], rtol=1e-12) for key in expected)
