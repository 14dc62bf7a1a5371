"""Every engine agrees with `serial` in float64 to 1e-12 after three rounds: unequal clients, partial cohorts, partial batches."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from feddkd import functional, parse
from feddkd.data.examples import Examples
from feddkd.data.federation import Federation, assemble
from feddkd.data.transforms import transform
from feddkd.engines import Engine, Order
from feddkd.engines.batched import Batched
from feddkd.engines.serial import Serial
from feddkd.evaluate import Protocol
from feddkd.method import Collect
from feddkd.params import to
from feddkd.rounds import Row, Run, play

METHODS = [
    "fedavg(epochs=2, batch_size=8, lr=0.1, momentum=0.5, nesterov=True, weight_decay=0.01)",
    # Adam magnifies the rounding of tiny gradients, hence eps
    "fedavg(steps=3, batch_size=8, optimiser='adam', lr=0.01, amsgrad=True, eps=0.001)",
    "fedprox(epochs=1, batch_size=8, mu=1)",
    "fedmax(epochs=1, batch_size=8, beta=10)",
    "fedbn(epochs=1, batch_size=8)",
    "fedavg(epochs=1, batch_size=8) | dkd(steps=3, batch_size=14, lr=0.3)",
    "fedavg(epochs=1, batch_size=8) | dkd(steps=2, batch_size=14, lr=0.3, student='batch', teacher='batch')",
    "fedbn(epochs=1, batch_size=8) | dkd(steps=3, batch_size=14)",
    "fedbn(epochs=1, batch_size=8, private='statistics') | dkd(steps=2, batch_size=14, student='batch')",
    "fedmax(epochs=1, batch_size=8) | dkd(steps=2, batch_size=8, warmup=1)",
]


def network(norm: bool) -> nn.Module:
    first: list[nn.Module] = [nn.BatchNorm2d(3)] if norm else []
    second: list[nn.Module] = [nn.BatchNorm1d(6)] if norm else [nn.Dropout(0.2)]
    conv = nn.Conv2d(1, 3, 3, padding=1, bias=False)
    return nn.Sequential(
        conv, *first, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 6, bias=False), *second, nn.Tanh(), nn.Linear(6, 3)
    ).double()


def world(seed: int, sizes: Sequence[int] = (10, 30, 19, 13), text: str = "") -> Federation:
    draw = torch.Generator().manual_seed(seed)

    def examples(count: int) -> Examples:
        x = torch.randint(0, 256, (count, 1, 4, 4), generator=draw, dtype=torch.uint8)
        return Examples(x, torch.randint(0, 3, (count,), generator=draw))

    return assemble([examples(n) for n in sizes], examples(25), examples(15), transform(text, 255.0))


def run(
    engine: type[Any], text: str, norm: bool, seeds: Sequence[int] = (0,), augment: str = "", place: str = "cpu",
    dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[list[Any], list[Row]]:  # fmt: skip
    model, method, device = functional(network(norm)), parse(text), torch.device(place)
    initial = [[to(group, device, dtype) for group in model.initial(("init", seed))] for seed in seeds]
    starts = [method.start(model, params, buffers) for params, buffers in initial]
    worlds = [world(seed, text=augment).to(device) for seed in seeds]
    host: Engine = engine(model, worlds, [memo for _, memo in starts], dtype, **options)
    runs = [Run(at, seed, starts[at][0], has_validation=True) for at, seed in enumerate(seeds)]
    protocol = Protocol.GLOBAL if method.private == {"none"} else Protocol.CLIENT_MEAN
    *_, rows = play(method, model, host, runs, cohort=3, last=3, protocol=protocol)
    host.close()
    return [one.state for one in runs], rows


def apart(first: Sequence[Any], second: Sequence[Any]) -> float:
    pairs = ((a[group][name], b[group][name]) for a, b in zip(first, second, strict=True) for group in a for name in a[group])
    return max(float((a.double().cpu() - b.double().cpu()).abs().max()) for a, b in pairs)


WAYS: dict[str, dict[str, Any]] = {
    "auto": {}, "vmap": {"strategy": "vmap"}, "traced": {"strategy": "traced"}, "loop": {"strategy": "loop"}, "vmap in chunks":
    {"strategy": "vmap", "lanes": 2},
}  # fmt: skip


@pytest.mark.parametrize("text", METHODS)
@pytest.mark.parametrize("norm", [False, True], ids=["no batch norm", "batch norm"])
@pytest.mark.parametrize("way", WAYS)
def test_batched_agrees_with_serial(text: str, norm: bool, way: str) -> None:
    expected, rows = run(Serial, text, norm)
    found, same = run(Batched, text, norm, **WAYS[way])
    assert apart(expected, found) < 1e-12
    for key, value in rows[0].items():
        assert same[0][key] == pytest.approx(value, abs=1e-10), key


@pytest.mark.parametrize("text", [METHODS[0], METHODS[7]])
@pytest.mark.parametrize("norm", [False, True], ids=["no batch norm", "batch norm"])
def test_several_seeds_in_one_program_are_the_seeds_one_by_one(text: str, norm: bool) -> None:
    together, _ = run(Batched, text, norm, seeds=(0, 1, 2), strategy="vmap")
    alone = [run(Serial, text, norm, seeds=(seed,))[0][0] for seed in (0, 1, 2)]
    assert apart(together, alone) < 1e-12


def distillations(engine: type[Any], cohorts: Sequence[tuple[int, ...]], rule: Collect) -> list[Any]:
    """What the distillation steps of a round gather, with these clients at each step."""
    model, method = functional(network(True)), parse("fedavg(epochs=1, batch_size=8) | dkd(steps=2, batch_size=14)")
    state, memo = method.start(model, *model.initial(("init", 0)))
    host: Engine = engine(model, [world(0)], [memo], torch.float64)
    gathered = []
    for exchange, cohort in zip(method.plan(1), ((0, 1, 2), *cohorts), strict=True):
        phase = exchange.phase if exchange.index == 0 else replace(exchange.phase, collect={"gradient": rule})
        order = Order(
            0, {**state, "rates": exchange.rates(1, state["params"]["0.weight"])}, cohort, (0, 1, exchange.index, exchange.step)
        )
        (reply,) = host.exchange(replace(exchange, phase=phase), [order])
        gathered.append(reply.collected)
    return gathered[1:]


@pytest.mark.parametrize("rule", list(Collect))
def test_distillation_goes_on_when_a_client_falls_silent_between_its_steps(rule: Collect) -> None:
    cohorts = [(0, 1, 2), (0, 2)]
    assert apart(distillations(Serial, cohorts, rule), distillations(Batched, cohorts, rule)) < 1e-12


def test_random_crops_and_flips_are_the_same_on_every_engine() -> None:
    text, augment = METHODS[5], "crop(padding=1) | flip() | normalise(mean=0.4, std=0.3)"
    assert apart(run(Serial, text, False, augment=augment)[0], run(Batched, text, False, augment=augment)[0]) < 1e-12


def test_two_runs_of_the_batched_engine_give_identical_bits() -> None:
    first, second = (run(Batched, METHODS[5], False, strategy="vmap")[0] for _ in range(2))
    assert apart(first, second) == 0


ON_CUDA: dict[str, dict[str, Any]] = {
    **{name: way for name, way in WAYS.items() if name != "traced"},  # that one is for CPUs
    "graph": {"strategy": "graph"}, "streams": {"strategy": "streams"}, "fused": {"strategy": "fused"}, "fused-streams":
    {"strategy": "fused-streams"}, "graph in chunks": {"strategy": "graph", "lanes": 2},
}  # fmt: skip
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_cuda
@pytest.mark.filterwarnings("ignore")  # compilers warn of their own affairs
@pytest.mark.parametrize("text", METHODS)
@pytest.mark.parametrize("norm", [False, True], ids=["no batch norm", "batch norm"])
@pytest.mark.parametrize("way", ON_CUDA)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-4)], ids=["float64", "float32"])
def test_batched_on_cuda_agrees_with_serial_on_the_cpu(
    text: str, norm: bool, way: str, dtype: torch.dtype, tolerance: float
) -> None:
    expected, _ = run(Serial, text, norm)
    found, _ = run(Batched, text, norm, place="cuda", dtype=dtype, precision="fp32", **ON_CUDA[way])
    assert apart(expected, found) < tolerance


@needs_cuda
@pytest.mark.parametrize("way", ["graph", "streams"])
def test_two_runs_on_cuda_give_identical_bits(way: str) -> None:
    first, second = (run(Batched, METHODS[5], False, place="cuda", dtype=torch.float32, strategy=way)[0] for _ in range(2))
    assert apart(first, second) == 0


@needs_cuda
@pytest.mark.parametrize("way", ["graph", "streams"])
def test_several_seeds_on_cuda_are_the_seeds_one_by_one(way: str) -> None:
    together, _ = run(Batched, METHODS[5], False, seeds=(0, 1, 2), place="cuda", strategy=way)
    alone = [run(Serial, METHODS[5], False, seeds=(seed,))[0][0] for seed in (0, 1, 2)]
    assert apart(together, alone) < 1e-12
