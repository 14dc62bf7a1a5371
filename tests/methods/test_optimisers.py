"""Local optimisers do what torch.optim does, step by step."""

from typing import Any

import pytest
import torch

from feddkd.methods.optimisers import Optimiser, adam, sgd
from feddkd.tensors import Tensors


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (sgd, torch.optim.SGD, {}),
        (sgd, torch.optim.SGD, {"weight_decay": 0.1}),
        (sgd, torch.optim.SGD, {"momentum": 0.9}),
        (sgd, torch.optim.SGD, {"momentum": 0.1, "nesterov": True, "weight_decay": 5e-4}),
        (adam, torch.optim.Adam, {}),
        (adam, torch.optim.Adam, {"weight_decay": 0.1, "eps": 1e-3}),
        (adam, torch.optim.Adam, {"amsgrad": True, "beta1": 0.5, "beta2": 0.9}),
    ],
)
def test_ten_steps_of_ours_are_ten_steps_of_torchs(
    ours: Any, theirs: Any, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    start = {"a": torch.randn(3, 4, dtype=torch.float64), "b": torch.randn(5, dtype=torch.float64)}
    gradients = [
        {name: torch.randn_like(tensor) * (10 - step) for name, tensor in start.items()}
        for step in range(10)
    ]
    reference = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    betas = {"betas": (options["beta1"], options["beta2"])} if "beta1" in options else {}
    optimiser = theirs(
        reference.values(),
        lr=0.05,
        **betas,
        **{k: v for k, v in options.items() if not k.startswith("beta")},
    )
    pair: Optimiser = ours(**options)
    params: Tensors = start
    state = pair.init(params)
    for gradient in gradients:
        for name, tensor in reference.items():
            tensor.grad = gradient[name]
        optimiser.step()
        params, state = pair.update(
            params, gradient, state, torch.tensor(0.05, dtype=torch.float64)
        )
    assert all(torch.allclose(params[name], reference[name], rtol=0, atol=1e-12) for name in start)


def test_adam_keeps_its_first_steps_exact_in_single_precision() -> None:
    params = {"w": torch.tensor([1.0])}
    pair = adam()
    moved, _ = pair.update(
        params, {"w": torch.tensor([1e-3])}, pair.init(params), torch.tensor(0.1)
    )
    # the first step is lr, whatever the gradient's size
    assert moved["w"].item() == pytest.approx(0.9, abs=2e-6)
