"""`simulate` in several threads and processes of one program: each run as if it were alone."""

import multiprocessing
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from feddkd import parse, simulate
from feddkd.engines.batched.engine import Batched
from feddkd.engines.pool.engine import Pool
from feddkd.engines.serial import Serial
from feddkd.models.seeded_build import seeded_generators
from feddkd.randomness import fold

THREADS, MANY = 4, 12
# not "auto": it chooses by timing between strategies that differ in rounding
ENGINES: dict[str, Any] = {
    "serial": Serial,
    "vmap": partial(Batched, strategy="vmap"),
    "traced": partial(Batched, strategy="traced"),
    "pool": partial(Pool, workers=2),
}
RUNS = {"serial": MANY, "vmap": 8, "traced": 4, "pool": 4}


def network() -> nn.Module:
    layers = nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(12, 3)
    return nn.Sequential(*layers)


def run(engine: str, seed: int) -> dict[str, Tensor]:
    """Return the final tensors of a small run, whose first weights follow the seed."""
    draw = torch.Generator().manual_seed(0)
    clients = [
        (torch.randn(12, 6, generator=draw), torch.randint(0, 3, (12,), generator=draw))
        for _ in range(3)
    ]
    result = simulate(
        model=network,
        clients=clients,
        test=clients[0],
        method="fedavg(epochs=1, batch_size=4) | dkd(steps=2, batch_size=4)",
        seed=seed,
        engine=ENGINES[engine],
        progress=False,
    )
    return dict(result.params)


@contextmanager
def other_work() -> Iterator[None]:
    """Draw from torch's global generator in another thread meanwhile, as a user's program may."""
    over = threading.Event()

    def draw() -> None:
        while not over.is_set():
            torch.rand(3)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def differing(engine: str, several: Callable[..., Any]) -> list[int]:
    """Return the seeds whose run among others differs from the same run alone."""
    seeds = range(RUNS[engine])
    alone = [run(engine, seed) for seed in seeds]
    together = list(several(run, [engine] * len(seeds), seeds))
    return [
        seed
        for seed in seeds
        if not all(torch.equal(alone[seed][name], together[seed][name]) for name in alone[seed])
    ]


@pytest.mark.parametrize("engine", ENGINES)
def test_runs_in_four_threads_are_each_as_if_it_were_alone(engine: str) -> None:
    with ThreadPoolExecutor(THREADS) as threads, other_work():
        assert differing(engine, threads.map) == []


def test_runs_in_several_processes_are_each_as_if_it_were_alone() -> None:
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as processes:
        assert differing("serial", processes.map) == []


def test_a_network_built_under_a_seed_has_the_weights_that_torchs_generator_gives() -> None:
    def numbers() -> list[Tensor]:
        layers = nn.Conv2d(2, 3, 3), nn.LSTM(2, 3), nn.Embedding(4, 2), nn.MultiheadAttention(4, 2)
        drawn = [*torch.rand(3, 2), torch.randn(3), torch.randint(9, (4,)), torch.randperm(5)]
        drawn += [torch.empty(4).log_normal_(), torch.bernoulli(torch.full((9,), 0.5))]
        drawn += [nn.init.trunc_normal_(torch.empty(5)), torch.normal(2.0, 3.0, (2,))]
        drawn += [nn.init.orthogonal_(torch.empty(3, 3)), torch.rand_like(torch.empty(3))]
        return [*drawn, *(p.detach() for layer in layers for p in layer.parameters())]

    key = ("init", 5)
    with seeded_generators(key):
        ours = numbers()
        state = torch.get_rng_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fold(key))
        assert torch.equal(state, torch.get_rng_state()), "the global generator was drawn from"
        assert all(map(torch.equal, ours, numbers()))


def test_a_simulation_leaves_generators_and_filters_of_warnings_as_they_were() -> None:
    def states() -> list[Any]:
        filters = list(warnings.filters)
        return [
            torch.get_rng_state().tolist(),
            str(np.random.get_state()),
            random.getstate(),
            filters,
        ]

    before = states()
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(run, ["serial"] * MANY, range(MANY)))
        list(threads.map(parse, [f"fedavg(epochs={n + 1})" for n in range(200)]))
    assert states() == before
