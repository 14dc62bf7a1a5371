"""The proof before a run:

a functional form that computes something else is refused, with the layer's name.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from feddkd import InputError, functional
from feddkd.models import comparison
from feddkd.models.comparison import is_close
from feddkd.models.functional import Model
from feddkd.models.proof import prove


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double()


def proven(model: Model) -> Model:
    x = torch.randn(4, 5, dtype=torch.float64)
    x[2:] *= 10  # the largest numbers are not in the examples that are added first
    return prove(model, *model.start(), x)


def with_slots(model: Model, **slots: str) -> Model:
    return replace(model, tensors=replace(model.tensors, slots={**model.tensors.slots, **slots}))


def test_a_network_that_is_computed_as_it_is_passes() -> None:
    assert proven(functional(network())).param_names == functional(network()).param_names


def test_a_tensor_in_the_wrong_place_is_found_in_its_layer() -> None:
    broken = with_slots(functional(network()), **{"1.weight": "1.bias"})
    with pytest.raises(InputError, match=r"layer '1' \(BatchNorm1d\).*evaluation mode"):
        proven(broken)


def test_what_differs_in_training_alone_is_found_too() -> None:
    model = functional(network())
    model.nets["train"] = model.nets["eval"]
    with pytest.raises(InputError, match="training mode"):
        proven(model)


def test_a_network_that_reads_batches_of_one_size_only_is_refused() -> None:
    class Fixed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.view(4, 5))

    with pytest.raises(InputError, match="any number of examples"):
        proven(functional(Fixed(5, 3).double()))


def test_a_gradient_that_differs_is_found_although_all_outputs_agree() -> None:
    model = functional(network())
    layer = model.nets["train"].get_submodule("0")
    layer.register_forward_hook(lambda module, inputs, output: output.detach())
    with pytest.raises(InputError, match=r"gradient of '0\.weight'"):
        proven(model)


def test_a_tensor_on_the_meta_device_never_takes_part() -> None:
    model = functional(network())
    slots = {slot: name for slot, name in model.tensors.slots.items() if slot != "3.bias"}
    with pytest.raises((InputError, RuntimeError)):
        proven(replace(model, tensors=replace(model.tensors, slots=slots)))


class Sums(nn.Module):
    """Couples the examples in a buffer alone."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(5, 3)
        self.register_buffer("total", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.total += x.detach().abs().sum(0)
        found: Tensor = self.out(x)
        return found


class Mixes(nn.Module):
    """Computes an example's output with the help of the whole batch."""

    def __init__(self, mix: Callable[[Tensor], Tensor], trained: bool = False) -> None:
        super().__init__()
        self.mix, self.trained = mix, trained

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x) if self.training or not self.trained else x


class SharedGradient(torch.autograd.Function):
    """Couples the examples in the gradient alone."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope / len(slope)


@pytest.mark.parametrize(
    ("net", "couples"),
    [
        (Mixes(lambda x: x / x.detach().abs().max()), True),
        (Mixes(lambda x: x + 1e-3 * x.mean(0)), True),
        (Mixes(lambda x: x + x[torch.randperm(len(x))], trained=True), True),
        (Mixes(lambda x: x + (torch.rand(()) < 1e-3) * x.mean(0), trained=True), True),
        (Mixes(lambda x: x + torch.randn_like(x), trained=True), False),
        (Mixes(lambda x: x.float().tanh().to(x.dtype)), False),
        (nn.Linear(5, 3), False),
        (nn.LayerNorm(5), False),
        (network(), True),
        (Sums(), True),
        (Mixes(SharedGradient.apply), True),
        (nn.Dropout(0.5), False),
    ],
    ids=[
        "largest number",
        "weak mean",
        "permutation",
        "rare mean",
        "noise",
        "float32 inside",
        "linear",
        "layer norm",
        "batch norm",
        "a buffer",
        "gradient",
        "dropout",
    ],
)
def test_networks_that_couple_examples_are_found_by_trying(net: nn.Module, couples: bool) -> None:
    assert proven(functional(nn.Sequential(nn.Linear(5, 5), net).double())).couples is couples


@pytest.mark.parametrize("at", [0, 3, 6])
def test_large_tensors_are_compared_in_pieces(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "CHUNK", 3)
    numbers = torch.tensor([[1.0, -2, 3, 1000, 5, 6, torch.nan]]).T
    other = numbers.clone()
    other[at] = other[at].nan_to_num() + 0.5  # less than a thousandth of the largest number
    assert is_close(numbers, other)
    other[at] += 1
    assert not is_close(numbers, other)
