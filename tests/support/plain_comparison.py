"""A method's rounds compared with the same rounds in plain PyTorch (plain_drift.Hooked)."""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from feddkd import parse, simulate
from feddkd.data.batches import Reads
from plain_drift import Hooked, Make
from small import pooled
from test_reference import SGD, is_norm
from test_reference import network as image_network

ROUNDS = 3


def images() -> list[tuple[Tensor, Tensor]]:
    """Clients of unequal size. With batches of four each epoch ends in a batch of three: batch norm
    on two magnifies rounding errors, and MOON's slope magnifies them again, to 1e-6 in the plain
    computation itself.
    """
    draw = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(n, 1, 4, 4, generator=draw, dtype=torch.float64) + k,
            torch.randint(0, 3, (n,), generator=draw),
        )
        for k, n in enumerate((11, 15, 23, 19))
    ]


def net_of(kind: str) -> nn.Module:
    """The reference tests' network, its last ReLU a Tanh: features that are all zero have no
    direction for MOON to compare.
    """
    net = image_network(kind)
    assert isinstance(net, nn.Sequential)
    net[-2] = nn.Tanh()
    return net


def compare_rounds(text: str, make: Make, settings: dict[str, Any], kind: str) -> Hooked:
    """Assert that three rounds give the plain computation's weights to 1e-10, and its accuracy.

    `kind` is "plain", "bn" or "private bn". Returns the plain computation.
    """
    start, data, method = net_of(kind.removeprefix("private ")), images(), parse(text)
    settings = {"reads": Reads(4, epochs=2), "optimiser": SGD, "lr": 0.05, **settings}
    if kind == "private bn":
        settings["private"], method = (
            partial(is_norm, start),
            replace(method, private=frozenset({"norm"})),
        )
    plain: Hooked = make(copy.deepcopy(start), data, 5, **settings)
    plain.run(rounds=ROUNDS, cohort=3)
    result = simulate(
        model=start,
        clients=data,
        test=pooled(data),
        method=method,
        rounds=ROUNDS,
        cohort=3,
        seed=5,
        initial=start.state_dict(),
        dtype=torch.float64,
    )
    expected = {
        name: tensor for name, tensor in plain.net.state_dict().items() if not plain.private(name)
    }
    assert set(result.params) == set(expected)
    for name, tensor in expected.items():
        assert torch.allclose(result.params[name], tensor, rtol=0, atol=1e-10), name
    accuracies = [_accuracy(plain.client_view(k), *pooled(data)) for k in range(len(data))]
    assert result.history[-1]["test_accuracy"] == pytest.approx(sum(accuracies) / len(accuracies))
    return plain


def _accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    return float((net.eval()(x).argmax(1) == y).double().mean())


def ends(texts: list[str]) -> list[Tensor]:
    """The same tensor of the shared model after the rounds of each method."""
    start, data = net_of("plain"), images()
    return [
        simulate(
            model=start,
            clients=data,
            test=data[0],
            method=text,
            rounds=ROUNDS,
            cohort=3,
            seed=5,
            initial=start.state_dict(),
            dtype=torch.float64,
        ).params["3.weight"]
        for text in texts
    ]
