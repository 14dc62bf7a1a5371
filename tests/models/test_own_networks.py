"""Users' own networks:

every engine and strategy computes what the module itself does with torch.optim, or refuses by name.
"""

import copy
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from feddkd import functional
from feddkd.data.batches import Reads
from feddkd.data.examples import Examples
from feddkd.data.federation import assemble
from feddkd.data.transforms import transform
from own_networks import CASES, CLASSES, WORDS, Case, draw
from plain_networks import PlainNetworks
from playing import job_of, play_job

SIZES = (11, 15, 16)  # with batches of four two clients end an epoch with three examples
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "fedavg": ("fedavg(epochs=1, batch_size=4, lr=0.05)", {}),
    "feddkd": (
        "fedavg(epochs=1, batch_size=4, lr=0.05) | dkd(steps=2, batch_size=5, lr=0.3)",
        {"distil": 2},
    ),
    "scaffold | dkd": (
        "scaffold(epochs=1, batch_size=4, lr=0.05) | dkd(steps=2, batch_size=5, lr=0.3)",
        {"distil": 2, "scaffold": True},
    ),
}
WAYS: dict[str, dict[str, Any]] = {
    "serial": {"engine": "serial"},
    **{
        name: {"engine": "batched", "options": {"strategy": name}}
        for name in ("vmap", "loop", "traced")
    },
    **(
        {"pool": {"engine": "pool", "options": {"workers": 2}}}
        if hasattr(os, "memfd_create")
        else {}
    ),
}
ON_CUDA: dict[str, dict[str, Any]] = {
    f"cuda {name}": {
        "engine": "batched",
        "device": "cuda",
        "options": {"strategy": name, "precision": "fp32"},
    }
    for name in ("loop", "vmap", "graph", "streams", "fused", "fused-streams", "kernels")
}
COMPILED = {
    "resnet-18, batch norm",
    "transformer encoder",
    "u-net",
    "frozen backbone",
    "tied language model",
    "dropout functions",
}


def network(case: Case) -> nn.Module:
    torch.manual_seed(3)
    return case.build().double()


def data(case: Case) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    classes = WORDS if case.build is CASES["tied language model"].build else CLASSES
    return [
        (draw(case.examples, n, generator), torch.randint(0, classes, (n,), generator=generator))
        for n in SIZES
    ]


def run(
    case: Case, net: nn.Module, text: str, way: dict[str, Any], rounds: int = 2, seed: int = 5
) -> tuple[dict[str, Tensor], Any]:
    """The final state_dict of a run with cohorts of two of three clients, and the last row."""
    model, pairs = functional(net, output=case.output), data(case)
    everything = torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
    federation = assemble(
        [Examples(*pair) for pair in pairs], Examples(*everything), None, transform("")
    )
    job = job_of(model, text, [federation], [model.start()], [seed], rounds=rounds, cohort=2)
    runs, rows = play_job(job, way["engine"], way.get("device", "cpu"), **way.get("options", {}))
    if runs[0].error is not None:
        raise runs[0].error
    return model.state_dict(runs[0].state["params"], runs[0].state["buffers"]), rows[-1][0]


def check(case: Case, way: str, method: str, tolerance: float = 1e-10) -> None:
    text, options = METHODS[method]
    net = network(case)
    before = {key: tensor.clone() for key, tensor in net.state_dict().items()}
    found, row = run(case, net, text, (WAYS | ON_CUDA)[way])
    plain = PlainNetworks(
        copy.deepcopy(net), data(case), 5, Reads(4, epochs=1), 0.05, logits=case.logits, **options
    )
    plain.run(rounds=2, cohort=2)
    expected = plain.net.state_dict()
    assert list(found) == list(expected)
    for key, tensor in expected.items():
        assert torch.allclose(found[key].double(), tensor.double(), rtol=0, atol=tolerance), key
    net.load_state_dict(found)  # strictly
    assert any(not torch.equal(before[key], tensor) for key, tensor in found.items())
    if way in WAYS:
        again, row_again = run(case, network(case), text, WAYS[way])
        assert all(torch.equal(found[key], again[key]) for key in found)
        assert row == row_again


QUICK = [(way, "feddkd") for way in ("serial", "vmap")]
LONG = [
    (way, method)
    for way in WAYS
    for method in METHODS
    if (way in ("serial", "vmap") or method == "feddkd") and (way, method) not in QUICK
]
THOROUGH = [
    (way, method) for way in WAYS for method in METHODS if (way, method) not in (*QUICK, *LONG)
]


@pytest.mark.parametrize(
    ("way", "method"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)]
)
@pytest.mark.parametrize("name", CASES)
def test_a_users_network_computes_what_it_would_with_torch_optim(
    name: str, way: str, method: str
) -> None:
    check(CASES[name], way, method)


@pytest.mark.networks
@pytest.mark.parametrize(("way", "method"), THOROUGH)
@pytest.mark.parametrize("name", CASES)
def test_the_rest_of_the_table(name: str, way: str, method: str) -> None:
    check(CASES[name], way, method)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore")  # compilers give warnings
@pytest.mark.parametrize("way", ON_CUDA)
@pytest.mark.parametrize("name", CASES)
def test_a_users_network_computes_the_same_on_a_gpu(name: str, way: str) -> None:
    if way.split()[1] in ("fused", "fused-streams", "kernels") and name not in COMPILED:
        pytest.skip("to compile takes long")
    check(CASES[name], way, "feddkd", tolerance=1e-8)
