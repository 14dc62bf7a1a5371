"""Data sets with random transforms."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import feddkd
from feddkd.data.examples import examples
from feddkd.data.transforms import transform
from feddkd.errors import InputError


class Jittered(Dataset[tuple[Tensor, int]]):
    """Items that are random in three ways; it counts how often it is read."""

    def __init__(self, count: int = 12) -> None:
        self.count, self.calls = count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.calls += 1
        drawn = torch.rand(5) + np.random.rand() + random.random()
        return drawn + index, index % 3


def test_every_version_is_a_call_and_follows_the_seed() -> None:
    data_set = Jittered()
    drawn = feddkd.redrawn(data_set, 4, seed=7)
    assert data_set.calls == 4 * len(data_set)
    assert drawn.x.shape == (12, 4, 5)
    assert len(drawn.x.unique(dim=1)[0]) == 4
    assert torch.equal(drawn.x, feddkd.redrawn(Jittered(), 4, seed=7).x)
    assert not torch.equal(drawn.x, feddkd.redrawn(Jittered(), 4, seed=8).x)


def test_the_users_generators_go_on_as_if_nothing_had_been_drawn() -> None:
    def draws() -> list[float]:
        return [torch.rand(1).item(), float(np.random.rand()), random.random()]

    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    expected = draws()
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    feddkd.redrawn(Jittered(), 2)
    assert draws() == expected


def test_training_reads_all_versions_alike_and_tests_read_the_first() -> None:
    x = torch.arange(4.0).expand(2_000, 4)[..., None]
    step = transform("version()")
    drawn = step(x, torch.float32, torch.tensor(5))
    assert (drawn.long().flatten().bincount() / 2_000 - 0.25).abs().max() < 0.05
    assert not step(x, torch.float32).any()


@pytest.mark.parametrize("engine", ["batched", "pool"])
def test_engines_read_the_same_versions(engine: str) -> None:
    def run(engine: str) -> list[dict[str, Any]]:
        clients = [feddkd.redrawn(Jittered(), 3, seed=k) for k in range(2)]
        result = feddkd.simulate(
            model=nn.Linear(5, 3),
            clients=clients,
            test=examples(feddkd.redrawn(Jittered(), 1)),
            initial={"weight": torch.full((3, 5), 0.1), "bias": torch.zeros(3)},
            method="fedavg(epochs=2, batch_size=4) | dkd(steps=2)",
            rounds=2,
            engine=engine,
            dtype="float64",
            progress=False,
        )
        return result.history

    for row, other in zip(run("serial"), run(engine), strict=True):
        assert row["test_loss"] == pytest.approx(other["test_loss"], abs=1e-12)


def test_what_cannot_be_redrawn_is_refused() -> None:
    with pytest.raises(InputError, match="not int"):
        feddkd.redrawn(7)
    with pytest.raises(InputError, match="versions must be >= 1"):
        feddkd.redrawn(Jittered(), 0)
    with pytest.raises(InputError, match="equally many"):
        feddkd.simulate(
            model=nn.Linear(5, 3),
            clients=[feddkd.redrawn(Jittered(), 2), feddkd.redrawn(Jittered(), 3)],
            test=Jittered(),
            method="fedavg()",
        )
