"""`grad` gives what torch.func's gives: alone, with extra results, nested, and under vmap."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad as grad_of_func
from torch.func import vmap

from feddkd.gradient import grad
from feddkd.models.functional import functional
from own_networks import CASES, draw

W = {"a": torch.tensor([1.0, -2.0], dtype=torch.float64), "unread": torch.ones(3)}


def cube(w: dict[str, Tensor], x: Tensor) -> Tensor:
    return ((w["a"] * x) ** 3).sum()


def test_the_gradient_is_that_of_torch_func() -> None:
    x = torch.tensor([3.0, 0.5], dtype=torch.float64)
    expected, actual = grad_of_func(cube)(W, x), grad(cube)(W, x)
    assert all(torch.equal(actual[name], expected[name]) for name in W)
    assert not any(tensor.requires_grad for tensor in actual.values())
    assert not W["a"].requires_grad


def test_a_loss_without_weights_has_the_gradient_zero() -> None:
    assert torch.equal(grad(lambda w: torch.tensor(2.0))(W)["a"], torch.zeros(2).double())


def test_extra_results_carry_no_graph() -> None:
    gradient, extra = grad(lambda w: (w["a"].sum(), {"twice": 2 * w["a"]}), has_aux=True)(W)
    assert torch.equal(gradient["a"], torch.ones(2).double())
    assert torch.equal(extra["twice"], 2 * W["a"])
    assert not extra["twice"].requires_grad


def test_a_gradient_in_a_gradient_is_differentiated() -> None:
    def twice(transform: Callable[..., Any]) -> Tensor:
        ones = torch.ones(2).double()
        slope: Tensor = transform(lambda w: transform(cube)(w, ones)["a"].sum())(W)["a"]
        return slope

    assert torch.equal(twice(grad), twice(grad_of_func))
    assert torch.equal(twice(grad), 6 * W["a"])


def test_gradients_under_vmap_are_those_of_single_rows() -> None:
    x = torch.tensor([[3.0, 0.5], [1.0, 2.0]], dtype=torch.float64)
    together = vmap(lambda row: grad(cube)(W, row)["a"])(x)
    alone = torch.stack([grad(cube)(W, row)["a"] for row in x])
    assert torch.allclose(together, alone, rtol=1e-14)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_networks_are_those_of_torch_func(name: str) -> None:
    case = CASES[name]
    model = functional(case.build().double(), output=case.output)
    params, buffers = model.initial(("init", 0))
    x = draw(case.examples, 4, torch.Generator().manual_seed(1))

    def loss(w: dict[str, Tensor]) -> Tensor:
        output = model(w, buffers, x, mode="train", key=torch.tensor(5))
        return output.logits.square().mean()

    expected, actual = grad_of_func(loss)(params), grad(loss)(params)
    assert all(torch.allclose(actual[n], expected[n], rtol=1e-10, atol=1e-12) for n in params)
