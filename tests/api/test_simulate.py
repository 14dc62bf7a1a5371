"""A run on data in memory, in one call."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from feddkd import InputError, Result, dkd, fedavg, functional, simulate
from feddkd.api.divided import gathered
from feddkd.tasks.labels import classification
from small import clients, distance, network, pooled

DATA, NET = clients(), network()
FEDDKD = "fedavg(epochs=1, batch_size=8) | dkd(steps=2, batch_size=8)"


def run(**changes: Any) -> Result:
    """Run FedDKD. `auto` chooses by timing, so two of its runs may differ by rounding."""
    plain = {"model": NET, "clients": DATA, "test": pooled(DATA), "method": FEDDKD}
    plain["engine"] = "serial"
    return simulate(**{**plain, **changes})


def bare(shape: tuple[int, ...] = (4, 5), label: int = 0) -> tuple[Tensor, Tensor]:
    return torch.zeros(shape, dtype=torch.float64), torch.full(shape[:1], label)


def test_the_result_holds_the_final_tensors_and_a_row_a_round(tmp_path: Path) -> None:
    result = run(rounds=3, validation=DATA[0])
    assert {name: t.shape for name, t in result.params.items()} == {
        n: t.shape for n, t in network().state_dict().items()
    }
    assert [row["round"] for row in result.history] == [1, 2, 3]
    assert {"test_accuracy", "validation_accuracy", "average_test_accuracy", "bytes_up"} <= set(
        result.history[0]
    )
    result.save(tmp_path / "w.safetensors")
    assert distance(load_file(tmp_path / "w.safetensors"), result.params) == 0
    result.save(str(tmp_path / "v.safetensors"))
    assert (tmp_path / "v.safetensors").read_bytes() == (tmp_path / "w.safetensors").read_bytes()


def test_the_test_accuracy_is_that_of_the_final_tensors() -> None:
    result, net = run(), network()
    net.load_state_dict(result.params)
    x, y = pooled(DATA)
    assert result.history[-1]["test_accuracy"] == pytest.approx(
        (net(x).argmax(1) == y).double().mean().item()
    )


def test_the_method_may_be_a_text_or_a_value_and_the_model_wrapped_or_not() -> None:
    value = fedavg(epochs=1, batch_size=8) | dkd(steps=2, batch_size=8)
    assert distance(run(method=value, model=functional(network())).params, run().params) == 0


def test_the_seed_decides_the_run_and_nothing_else_does() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).double()

    torch.manual_seed(1)
    first = run(seed=1, model=build)
    torch.manual_seed(2)
    assert distance(first.params, run(seed=1, model=build).params) == 0
    assert distance(first.params, run(seed=2, model=build).params) > 0


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedmax", "fedavg | dkd", "fedmax | dkd"])
def test_with_weight_files_and_full_batches_the_seed_does_not_matter(method: str) -> None:
    text = " | ".join(f"{part}(batch_size=33)" for part in method.split(" | "))
    first, *others = (
        run(method=text, initial=network().state_dict(), seed=seed, rounds=2)
        for seed in (0, 1, 12345)
    )
    assert all(distance(first.params, other.params) == 0 for other in others)
    assert all(first.history == other.history for other in others)


@pytest.mark.parametrize("given", [torch.float64, "float64"])
def test_numbers_are_of_the_type_asked_for(given: Any) -> None:
    assert all(
        t.dtype == torch.float64 for t in run(model=network().float(), dtype=given).params.values()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_are_of_the_type_of_the_weights_unless_said(dtype: torch.dtype) -> None:
    assert {t.dtype for t in run(model=network().to(dtype)).params.values()} == {dtype}
    initial = network().to(dtype).state_dict()
    assert {t.dtype for t in run(initial=initial).params.values()} == {dtype}


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


def test_the_users_generators_network_and_data_are_left_as_they_were() -> None:
    net = (
        nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), Noisy(), nn.Linear(8, 3))
        .double()
        .train()
    )
    initial, x = {name: t.clone() for name, t in net.state_dict().items()}, DATA[0][0].clone()
    before, random = torch.get_rng_state(), str(np.random.get_state())
    run(model=net, initial=initial, method="fedbn() | dkd()")
    assert torch.equal(before, torch.get_rng_state())
    assert random == str(np.random.get_state())
    assert distance(initial, net.state_dict()) == 0
    assert torch.equal(x, DATA[0][0])
    assert net.training
    assert all(parameter.grad is None and parameter.requires_grad for parameter in net.parameters())
    assert isinstance(net[2], nn.Dropout)


def test_clients_may_be_tensors_arrays_or_data_sets() -> None:
    arrays = [(x.numpy(), y.numpy()) for x, y in DATA]
    sets = [TensorDataset(x, y) for x, y in DATA]
    assert distance(run(clients=arrays).params, run().params) == 0
    assert distance(run(clients=sets, test=TensorDataset(*pooled(DATA))).params, run().params) == 0


def test_a_cohort_is_a_share_or_a_number_of_clients() -> None:
    assert [len(row["clients"]) for row in run(cohort=2, rounds=2).history] == [2, 2]
    assert distance(run(cohort=0.67, rounds=2).params, run(cohort=2, rounds=2).params) == 0
    assert len(run(cohort=0.01).history[0]["clients"]) == 1


def test_numbers_of_numpy_will_do() -> None:
    assert (
        distance(
            run(seed=np.int64(3), rounds=np.int32(2), cohort=np.float64(0.67)).params,
            run(seed=3, rounds=2, cohort=2).params,
        )
        == 0
    )


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("oops")


def state(**changes: Tensor | None) -> Mapping[str, Tensor]:
    whole = {**network().state_dict(), **{name.replace("_", "."): t for name, t in changes.items()}}
    return {name: t for name, t in whole.items() if t is not None}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"clients": []}, "at least one client"),
        ({"clients": [DATA[0], bare((0, 5))]}, r"client 1: .*empty"),
        ({"clients": [DATA[0], bare((4, 6))]}, r"some are \(5,\).* others \(6,\)"),
        ({"clients": [DATA[0], (DATA[0][0], DATA[1][1])]}, "client 1: "),
        ({"clients": [(DATA[0][0] * torch.nan, DATA[0][1])]}, "client 0: .*NaN"),
        ({"clients": [(DATA[0][0], DATA[0][1] - 5)]}, "client 0: .*label"),
        ({"clients": [DATA[0], 7]}, "client 1: .*int"),
        ({"clients": {"ann": DATA[0]}}, "clients must be a list .*dict"),
        ({"evaluation": ["global"]}, "evaluation"),
        ({"clients": [DATA[0], bare(label=3)]}, r"labels go up to 3.* returns 3"),
        ({"test": bare(label=9)}, "labels go up to 9"),
        ({"test": None}, "test is missing"),
        ({"test": bare((0, 5))}, "test: .*empty"),
        ({"validation": bare((0, 5))}, "validation: .*empty"),
        ({"model": nn.Linear(9, 3)}, r"cannot read examples of shape \(5,\)"),
        ({"model": Broken()}, "cannot read examples .*oops"),
        ({"model": nn.Sequential(nn.Linear(5, 3), nn.Flatten(0))}, r"logits.*\(12,\)"),
        ({"model": nn.Flatten()}, "parameters"),
        ({"model": "mlp"}, "torch.nn.Module.*not str"),
        ({"model": nn.Linear}, r"builds the network failed.*in_features"),
        ({"method": "fedsvg()"}, "'fedsvg' .*; there are: .*dkd, .*fedavg, "),
        ({"method": "dkd()"}, r"fedavg\(\) \| dkd\(\)"),
        ({"method": dkd()}, r"fedavg\(\) \| dkd\(\)"),
        ({"method": None}, "method must be"),
        ({"rounds": 0}, "rounds must be >= 1, not 0"),
        ({"rounds": 1.5}, "rounds must be a whole number, not 1.5"),
        ({"cohort": 0}, "cohort must be >= 1"),
        ({"cohort": 0.0}, "cohort must be > 0"),
        ({"cohort": 4}, "cohort asks for 4 clients"),
        ({"cohort": "all"}, "cohort must be a whole number or a number, not 'all'"),
        ({"seed": -1}, "seed must be >= 0"),
        ({"seed": "x"}, "seed must be a whole number"),
        ({"engine": "steam"}, "'steam'; there are: auto, batched, pool, serial"),
        ({"device": "abacus"}, "'abacus'.*'cpu'"),
        ({"device": "meta"}, "'meta'.*'cpu'"),
        ({"dtype": "float16"}, "'float16'; there are: float32, float64"),
        ({"dtype": torch.int64}, "'int64'; there are: float32, float64"),
        ({"dtype": float}, "there are: float32, float64"),
        ({"model": network().bfloat16()}, "bfloat16.*float32, float64.*dtype"),
        ({"initial": state(**{"0_bias": None})}, r"lacks '0\.bias'"),
        ({"initial": state(extra=torch.zeros(1))}, "'extra'"),
        ({"initial": state(**{"0_bias": torch.zeros(2)})}, r"'0\.bias' has shape \(2,\)"),
        ({"method": "fedmax()", "model": nn.Conv1d(5, 3, 1)}, "linear layer"),
    ],
)
def test_what_cannot_be_used_is_refused_in_words(changes: dict[str, Any], says: str) -> None:
    if isinstance(changes.get("model"), nn.Conv1d):
        changes = {
            **changes,
            "model": nn.Sequential(
                nn.Unflatten(1, (5, 1)), changes["model"].double(), nn.Flatten()
            ),
        }
    with pytest.raises(InputError, match=says):
        run(**changes)


@pytest.mark.parametrize("kind", ["f4", "f8", "u1", ">f4", "i8"])
def test_clients_read_together_are_those_read_one_by_one(kind: str) -> None:
    draw = np.random.default_rng(0)
    pairs = [
        (draw.integers(0, 9, (size, 3)).astype(kind), draw.integers(0, 2, size))
        for size in (4, 1, 6)
    ]
    whole, single = (
        gathered(form(pairs), pairs[2], [pairs[1]] * 3, None, pairs[0], classification())
        for form in (list, lambda pairs: [list(zip(x, y, strict=True)) for x, y in pairs])
    )
    assert whole.x.dtype == single.x.dtype
    assert torch.equal(whole.x, single.x)
    assert torch.equal(whole.y, single.y)
    for part in ("train", "own_test"):
        assert [*map(list, getattr(whole, part))] == [*map(list, getattr(single, part))]
    for part in ("test", "validation", "public"):
        assert list(getattr(whole, part)) == list(getattr(single, part))
