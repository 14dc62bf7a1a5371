"""Personalised methods: against plain PyTorch, by their laws, on every engine."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from feddkd import simulate
from feddkd.data.batches import Reads
from plain_comparison import ROUNDS, images, net_of
from plain_drift import Make
from plain_personal import (
    APFL,
    Ditto,
    FedBABU,
    FedRep,
    FineTuned,
    PerFedAvg,
    Personal,
    PFedMe,
    head_names,
)
from small import distance, pooled
from test_reference import DKD, DKD_TEXT, SGD

L = "epochs=2, batch_size=4, lr=0.05"
HEAVY = "momentum=0.9, weight_decay=0.01, lr_decay=0.5"
HEAVILY = {"optimiser": partial(SGD, momentum=0.9, weight_decay=0.01), "lr_decay": 0.5}
# few steps, since batch norm on small batches magnifies rounding errors, and the inner steps again
M, M_READS = "epochs=1, batch_size=8, lr=0.05", {"reads": Reads(8)}
T = DKD_TEXT.format("")
FOUR = Reads(4, epochs=4)  # two epochs for the head and two for the body


def is_head(net: nn.Module, name: str) -> bool:
    return name in head_names(net)


def is_body(net: nn.Module, name: str) -> bool:
    return name not in head_names(net)


HEAD, BODY = {"private": is_head}, {"private": is_body}
CASES: list[tuple[str, Make, dict[str, Any]]] = [
    (f"fedper({L})", Personal, HEAD),
    (f"fedper({L}, {HEAVY})", Personal, {**HEAVILY, **HEAD}),
    (f"fedper({L}) | {T}", Personal, {**HEAD, "dkd": DKD}),
    (f"lg_fedavg({L})", Personal, BODY),
    (f"lg_fedavg({L}) | {T}", Personal, {**BODY, "dkd": DKD}),
    (f"fedrep({L}, head_epochs=2)", FedRep, {**HEAD, "reads": FOUR}),
    (f"fedrep({L}, {HEAVY}, head_epochs=2)", FedRep, {**HEAVILY, **HEAD, "reads": FOUR}),
    (f"fedrep({L}, head_epochs=2) | {T}", FedRep, {**HEAD, "reads": FOUR, "dkd": DKD}),
    (f"fedbabu({L})", FedBABU, HEAD),
    (
        f"fedbabu({L}, {HEAVY}, tune_epochs=2, tune='head')",
        FedBABU,
        {**HEAVILY, **HEAD, "tune": Reads(4, epochs=2), "part": "head"},
    ),
    (f"fedbabu({L}) | {T}", FedBABU, {**HEAD, "dkd": DKD}),
    (f"fedavg({L}) | fine_tune(epochs=3, batch_size=8)", FineTuned, {}),
    (
        f"fedper({L}) | fine_tune(epochs=3, batch_size=8, part='body')",
        FineTuned,
        {**HEAD, "part": "body"},
    ),
    (f"ditto({L})", Ditto, {}),
    (f"ditto({L}, {HEAVY}, lam=0.1)", Ditto, {**HEAVILY, "lam": 0.1}),
    (f"ditto({L}) | {T}", Ditto, {"dkd": DKD}),
    (f"apfl({L})", APFL, {}),
    (f"apfl({L}, {HEAVY}, alpha=0.25)", APFL, {**HEAVILY, "alpha": 0.25}),
    (f"apfl({L}, adaptive=False) | {T}", APFL, {"adaptive": False, "dkd": DKD}),
    (f"pfedme({M})", PFedMe, M_READS),
    (
        f"pfedme({M}, {HEAVY}, lam=2, inner_steps=3, inner_lr=0.2, beta=1.5)",
        PFedMe,
        {**HEAVILY, **M_READS, "lam": 2, "inner_steps": 3, "inner_lr": 0.2, "beta": 1.5},
    ),
    (f"pfedme({M}) | {T}", PFedMe, {**M_READS, "dkd": DKD}),
    (f"per_fedavg({L}, alpha=0.1)", PerFedAvg, {"alpha": 0.1}),
    (
        f"per_fedavg({L}, {HEAVY}, alpha=0.3, tune_steps=3)",
        PerFedAvg,
        {**HEAVILY, "alpha": 0.3, "tune": Reads(4, steps=3)},
    ),
    (f"per_fedavg({L}, form='hf', alpha=0.3)", PerFedAvg, {"form": "hf", "alpha": 0.3}),
    (
        f"per_fedavg({L}, form='hf', alpha=0.3, delta=0.1) | {T}",
        PerFedAvg,
        {"form": "hf", "alpha": 0.3, "delta": 0.1, "dkd": DKD},
    ),
]


def cases() -> list[Any]:
    """Return the cases on the plain network, and the first of each method with batch norm, too."""
    makes: set[Make] = set()
    found = []
    for text, make, settings in CASES:
        found.append(pytest.param(text, make, settings, "plain", id=text))
        if make not in makes:
            found.append(pytest.param(text, make, settings, "bn", id=f"{text} with batch norm"))
        makes.add(make)
    return found


@pytest.mark.parametrize(("text", "make", "settings", "kind"), cases())
def test_three_rounds_equal_the_plain_computation(
    text: str, make: Make, settings: dict[str, Any], kind: str
) -> None:
    start, data = net_of(kind), images()
    settings = {"reads": Reads(4, epochs=2), "optimiser": SGD, "lr": 0.05, **settings}
    if "private" in settings:
        settings["private"] = partial(settings["private"], start)
    plain = make(copy.deepcopy(start), data, 5, **settings)
    assert isinstance(plain, Personal)
    plain.run(rounds=ROUNDS, cohort=3)
    options: dict[str, Any] = {"rounds": ROUNDS, "cohort": 3, "seed": 5, "engine": "serial"}
    result = simulate(
        model=start,
        clients=data,
        test=pooled(data),
        method=text,
        initial=start.state_dict(),
        dtype=torch.float64,
        **options,
    )
    shared = {n: tensor for n, tensor in plain.net.state_dict().items() if not plain.private(n)}
    assert distance(result.params, shared) < 1e-10
    assert len(result.private) >= 3
    for k in result.private:
        assert distance(result.state_dict(client=k), plain.judged(k).state_dict()) < 1e-10, k
    accuracies = [_accuracy(plain.judged(k), *pooled(data)) for k in range(len(data))]
    assert result.history[-1]["test_accuracy"] == pytest.approx(sum(accuracies) / len(accuracies))


def _accuracy(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    return float((net.eval()(x).argmax(1) == y).double().mean())
