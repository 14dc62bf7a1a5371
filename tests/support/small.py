"""Small federations, networks and runs that several tests share."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from feddkd import Result, simulate
from feddkd.data.examples import Examples
from feddkd.data.federation import Federation, assemble
from feddkd.data.transforms import transform

Pair = tuple[Tensor, Tensor]


def clients(
    sizes: Sequence[int] = (12, 20, 33), features: int = 5, classes: int = 3, seed: int = 0
) -> list[Pair]:
    """Return clients that differ: each draws its examples around another centre."""
    draw = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(n, features, generator=draw, dtype=torch.float64) + k,
            torch.randint(0, classes, (n,), generator=draw),
        )
        for k, n in enumerate(sizes)
    ]


def pooled(data: Sequence[Pair]) -> Pair:
    return torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])


def network(features: int = 5, classes: int = 3, hidden: int = 7, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes)
    ).double()


def federation(data: Sequence[Pair]) -> Federation:
    return assemble([Examples(x, y) for x, y in data], Examples(*data[0]), None, transform(""))


def run(text: str, data: Sequence[Pair], net: nn.Module, **options: Any) -> Result:
    """A run in float64 from the network's own weights."""
    settings = {
        "rounds": 2,
        "seed": 3,
        "engine": "serial",
        "initial": net.state_dict(),
        "dtype": torch.float64,
        **options,
    }
    return simulate(model=net, clients=data, test=pooled(data), method=text, **settings)


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert set(a) == set(b)
    return max((a[name] - b[name]).abs().max().item() for name in a)
