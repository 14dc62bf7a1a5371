"""Every task with four methods: each engine gives what plain PyTorch gives, in float64 to 1e-12."""

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from feddkd import Experiment, simulate
from feddkd.runs.prepare import Prepared, prepare
from feddkd.runs.session import job
from feddkd.simulation import Simulation
from feddkd.tensors import to
from feddkd.trees import take
from plain_tasks import METHODS, PlainTaskRun
from small import distance
from small_tasks import SMALL, MeanOfPast, registered

ROUNDS, COHORT, SEEDS = 2, 3, (3, 4)


@pytest.fixture(autouse=True, scope="module")
def names() -> Iterator[None]:
    with registered():
        yield


def keys(kind: str, method: str, seed: int = SEEDS[0]) -> dict[str, Any]:
    return {
        "method": METHODS[method],
        "data": f"small_task(kind={kind!r})",
        "partition": "power_law()",
        "model": SMALL[kind].model,
        "task": SMALL[kind].text,
        "clients": 4,
        "cohort": COHORT,
        "rounds": ROUNDS,
        "seed": seed,
        "metrics": ["loss"],
        "dtype": "float64",
    }


@cache
def ready(kind: str, seed: int) -> Prepared:
    return prepare(Experiment(**keys(kind, "fedavg", seed)), None)


@cache
def expected(kind: str, method: str, seed: int) -> tuple[dict[str, Tensor], float]:
    """Return the weights after a plain run, and the loss on the test set."""
    prepared = ready(kind, seed)
    federation = prepared.federation
    clients = [(take(federation.x, at), take(federation.y, at)) for at in federation.train]
    net = prepare(Experiment(**keys(kind, method, seed)), None).model.net.double()
    plain = PlainTaskRun(SMALL[kind], net, clients, method, seed)
    plain.play(ROUNDS, COHORT)
    x, y = take(federation.x, federation.test), take(federation.y, federation.test)
    loss = SMALL[kind].loss(net(x), y).item()
    return {name: w.detach() for name, w in net.named_parameters()}, loss


def check(
    kind: str, method: str, engine: str, seeds: tuple[int, ...], device: str = "cpu", **options: Any
) -> None:
    experiments = [Experiment(**keys(kind, method, seed)) for seed in seeds]
    work = job(experiments, [ready(kind, seed) for seed in seeds])
    with Simulation(work, engine, device, options) as simulation:
        rows = list(simulation.rounds())
    for run, seed in zip(simulation.runs, seeds, strict=True):
        wanted, loss = expected(kind, method, seed)
        assert distance(to(run.state["params"], "cpu", torch.float64), wanted) < 1e-12
        assert rows[-1][run.index]["test_loss"] == pytest.approx(loss, rel=1e-12)
    assert len(rows) == ROUNDS


def test_the_loss_of_several_batches_is_a_mean_over_tokens() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(1, 7, (1500, 6), generator=draw)
    y = torch.randint(1, 7, (1500, 6), generator=draw)
    y[:1000, 1:] = 0  # in the first batch of an evaluation few tokens count
    y[1000:] = x[1000:]
    net = MeanOfPast().double()
    result = simulate(
        model=net,
        clients=[(x[:20], y[:20])],
        test=(x, y),
        task="language(padding=0)",
        method="fedavg(steps=1, lr=0.5)",
        engine="serial",
    )
    net.load_state_dict(result.state_dict())
    exact = cross_entropy(net(x).flatten(0, 1), y.flatten(), ignore_index=0).item()
    assert result.history[0]["test_loss"] == pytest.approx(exact, rel=1e-12)
    assert result.history[0]["test_perplexity"] == pytest.approx(math.exp(exact), rel=1e-12)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", SMALL)
def test_serial_computes_what_plain_pytorch_does(kind: str, method: str) -> None:
    check(kind, method, "serial", SEEDS[:1])


@pytest.mark.parametrize("kind", ["segmentation", "language", "own"])
def test_gradients_weighted_by_examples_are_weighted_by_tokens(kind: str) -> None:
    check(kind, "weighted", "batched", SEEDS, strategy="vmap")


@pytest.mark.long
@pytest.mark.parametrize("method", [method for method in METHODS if method != "weighted"])
@pytest.mark.parametrize("kind", [kind for kind in SMALL if kind not in ("mse", "mae")])
@pytest.mark.parametrize(
    ("engine", "seeds", "options"),
    [
        ("batched", SEEDS, {"strategy": "vmap"}),
        ("batched", SEEDS[:1], {"strategy": "traced"}),
        ("batched", SEEDS[:1], {"strategy": "loop"}),
        ("pool", SEEDS[:1], {"workers": 2}),
    ],
    ids=["vmap", "traced", "loop", "pool"],
)
def test_every_engine_computes_what_plain_pytorch_does(
    kind: str, method: str, engine: str, seeds: tuple[int, ...], options: dict[str, Any]
) -> None:
    check(kind, method, engine, seeds, **options)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore")  # a first capture gives warnings
@pytest.mark.parametrize("strategy", ["vmap", "graph", "streams"])
@pytest.mark.parametrize("kind", SMALL)
def test_a_gpu_computes_what_plain_pytorch_does(kind: str, strategy: str) -> None:
    check(kind, "feddkd", "batched", SEEDS, "cuda", strategy=strategy, precision="fp32")
