"""RegMean and CCVR, pieces that correct the average at the server: against plain PyTorch, by their
laws, on every engine.
"""

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

from feddkd import InputError
from feddkd.errors import RunError
from feddkd.models.functional import functional
from feddkd.models.layer_inputs import layer_inputs
from plain_calibrated import CCVR, FixedNormal, RegMean
from plain_comparison import compare_rounds
from plain_drift import Make
from small import clients, distance, network, pooled, run
from test_reference import DKD, DKD_TEXT

DATA, NET = clients(), network()
CONVOLUTION = nn.Sequential(nn.Conv2d(1, 3, (1, 5)), nn.Flatten()).double()
L = "fedavg(epochs=2, batch_size=4, lr=0.05)"
S = "server_steps=5, server_batch_size=6"
SERVER = {"server_steps": 5, "server_size": 6}
T = DKD_TEXT.format("")
CASES: list[tuple[str, Make, dict[str, Any], str]] = [
    (f"{L} | regmean()", RegMean, {}, "plain"),
    (f"{L} | regmean()", RegMean, {}, "bn"),
    (
        f"{L} | regmean(alpha=0.3, epsilon=0.1)",
        RegMean,
        {"regress_alpha": 0.3, "epsilon": 0.1},
        "private bn",
    ),
    (f"{L} | regmean() | {T}", RegMean, {"dkd": DKD}, "plain"),
    (f"{L} | ccvr({S})", CCVR, SERVER, "plain"),
    (f"{L} | ccvr({S}, samples=7, warmup=2)", CCVR, {**SERVER, "samples": 7, "warmup": 2}, "bn"),
    (f"{L} | ccvr({S}, server_lr=0.5)", CCVR, {**SERVER, "server_lr": 0.5}, "private bn"),
    (f"{L} | ccvr({S}) | {T}", CCVR, {**SERVER, "dkd": DKD}, "plain"),
]


@pytest.mark.parametrize(("text", "make", "settings", "kind"), CASES)
def test_three_rounds_equal_the_plain_computation(
    text: str, make: Make, settings: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module("feddkd.methods.ccvr")
    monkeypatch.setattr(module, "generator", lambda key: FixedNormal())
    compare_rounds(text, make, settings, kind)


@pytest.mark.parametrize("piece", ["regmean()", f"ccvr({S})"])
@pytest.mark.parametrize("engine", ["batched", "pool"])
def test_every_engine_computes_the_same(piece: str, engine: str) -> None:
    ends = [run(f"{L} | {piece}", DATA, NET, engine=e, cohort=2) for e in ("serial", engine)]
    assert distance(ends[0].params, ends[1].params) < 1e-12


def test_regmean_gives_one_layer_the_outputs_that_clients_have_on_average() -> None:
    """For a network of one layer: no other weights are nearer to the clients' own outputs."""
    torch.manual_seed(0)
    net = nn.Linear(5, 3, bias=False).double()
    text, data = "fedavg(epochs=5, batch_size=40)", DATA  # one batch: no order is drawn
    own = [run(text, [one], net, rounds=1).params["weight"] for one in data]
    x = torch.cat([x for x, _ in data])
    outputs = torch.cat([x @ w.T for w, (x, _) in zip(own, data, strict=True)])
    best = torch.linalg.lstsq(x, outputs).solution.T
    merged = run(f"{text} | regmean(alpha=1.0, epsilon=1e-12)", data, net, rounds=1)
    assert torch.allclose(merged.params["weight"], best, atol=1e-9)


def test_layers_that_cannot_be_regressed_stay_the_average(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(import_module("feddkd.methods.regmean"), "WIDEST", 6)  # the head has 7
    plain = run(L, DATA, NET, rounds=1).params
    merged = run(f"{L} | regmean()", DATA, NET, rounds=1).params
    assert not torch.equal(merged["0.weight"], plain["0.weight"])
    for name in ("0.bias", "2.weight", "2.bias"):
        assert torch.equal(merged[name], plain[name])


def test_a_layer_that_is_called_twice_tells_both_inputs_and_leaves_no_hook() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x))  # type: ignore[no-any-return]

    model, x = functional(Twice()), torch.randn(3, 4)
    params, buffers = model.start()
    found = layer_inputs(model, params, buffers, x, None, frozenset({"layer"}))["layer"]
    assert [len(rows) for rows in found] == [3, 3]
    assert torch.equal(found[0], x)
    assert not any(module._forward_pre_hooks for module in model.nets["eval"].modules()) or (
        model.head == "layer"
    )


@pytest.mark.parametrize(
    ("text", "net", "words"),
    [
        (L + " | regmean()", CONVOLUTION, "linear layer"),
        (f"{L} | private(names='*.weight') | regmean()", NET, "regmean"),
        (f"{L} | private(names='2.*') | ccvr()", NET, "ccvr"),
        ("local_only() | ccvr()", NET, "whole models stay"),
        ("regmean()", NET, "model"),
        ("ccvr()", NET, "no earlier phase"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(text: str, net: nn.Module, words: str) -> None:
    data = [(x.reshape(-1, 1, 1, 5), y) for x, y in DATA] if net is CONVOLUTION else DATA
    with pytest.raises(InputError, match=words):
        run(text, data, net)


def test_classes_of_one_example_each_cannot_be_calibrated() -> None:
    data = [(x[:1], y[:1] * 0 + k) for k, (x, y) in enumerate(DATA)]
    with pytest.raises(RunError, match="two examples"):
        run(f"fedavg(epochs=1, batch_size=4) | ccvr({S})", data, NET)


def test_sums_go_up_once_and_their_bytes_count() -> None:
    inside, features = pooled(DATA)[0].shape[1], 7
    rows = {p: run(f"{L}{p}", DATA, NET, rounds=1).history[0] for p in ("", " | regmean()")}
    gram = inside**2 + features**2 + 7 * inside + 3 * features
    assert rows[" | regmean()"]["bytes_up"] - rows[""]["bytes_up"] == 3 * 8 * gram
    told = run(f"{L} | ccvr({S})", DATA, NET, rounds=1).history[0]["bytes_up"]
    assert told - rows[""]["bytes_up"] == 3 * 8 * 3 * (1 + features + features**2)
