"""Sharpness-aware methods, FedCM, FedExP and FedACG: against plain PyTorch, by their laws, on every
engine.
"""

from functools import partial
from typing import Any

import pytest
import torch

from feddkd import InputError, parse
from feddkd.engines.serial import Serial
from plain_comparison import compare_rounds, ends
from plain_drift import Make
from plain_sharpness import (
    FedACG,
    FedCM,
    FedExP,
    FedGamma,
    FedLESAM,
    FedSAM,
    FedSMOO,
    FedSpeed,
    MoFedSAM,
)
from small import clients, distance, network, run
from test_engines import apart
from test_engines import run as engine_run
from test_methods_drift import ENGINES
from test_reference import DKD, DKD_TEXT, SGD

L = "epochs=2, batch_size=4, lr=0.05"
HEAVY = "momentum=0.9, weight_decay=0.01, lr_decay=0.5"
HEAVILY = {
    "optimiser": partial(SGD, momentum=0.9, weight_decay=0.01),
    "rho": 0.9,
    "lr_decay": 0.5,
}
T = DKD_TEXT.format("")

CASES: list[tuple[str, Make, dict[str, Any]]] = [
    (f"fedsam({L}, rho=0.1)", FedSAM, {"perturbation": 0.1}),
    (f"fedsam({L}, {HEAVY})", FedSAM, HEAVILY),
    (f"fedsam({L}, rho=0.5) | {T}", FedSAM, {"perturbation": 0.5, "dkd": DKD}),
    (f"fedcm({L})", FedCM, {}),
    (f"fedcm({L}, {HEAVY}, alpha=0.5)", FedCM, {**HEAVILY, "alpha": 0.5}),
    (f"fedcm({L}) | {T}", FedCM, {"dkd": DKD}),
    (f"mofedsam({L}, rho=0.5)", MoFedSAM, {"perturbation": 0.5}),
    (f"mofedsam({L}, {HEAVY}, alpha=0.3)", MoFedSAM, {**HEAVILY, "alpha": 0.3}),
    (f"fedexp({L})", FedExP, {}),
    (f"fedexp({L}, {HEAVY}, epsilon=0)", FedExP, {**HEAVILY, "epsilon": 0}),
    (f"fedexp({L}) | {T}", FedExP, {"dkd": DKD}),
    (f"fedacg({L})", FedACG, {}),
    (
        f"fedacg({L}, {HEAVY}, server_momentum=0.5, beta=1)",
        FedACG,
        {**HEAVILY, "momentum": 0.5, "beta": 1},
    ),
    (f"fedacg({L}) | {T}", FedACG, {"dkd": DKD}),
    (f"fedgamma({L})", FedGamma, {}),
    (f"fedgamma({L}, {HEAVY}, rho=0.5)", FedGamma, {**HEAVILY, "perturbation": 0.5}),
    (f"fedspeed({L})", FedSpeed, {}),
    (
        f"fedspeed({L}, {HEAVY}, rho=0.5, alpha=0.5)",
        FedSpeed,
        {**HEAVILY, "perturbation": 0.5, "alpha": 0.5},
    ),
    (f"fedspeed({L}) | {T}", FedSpeed, {"dkd": DKD}),
    (f"fedsmoo({L})", FedSMOO, {}),
    (
        f"fedsmoo({L}, {HEAVY}, rho=0.5, alpha=0.5)",
        FedSMOO,
        {**HEAVILY, "perturbation": 0.5, "alpha": 0.5},
    ),
    (f"fedsmoo({L}) | {T}", FedSMOO, {"dkd": DKD}),
    (f"fedlesam({L})", FedLESAM, {}),
    (f"fedlesam({L}, {HEAVY}, rho=0.5)", FedLESAM, {**HEAVILY, "perturbation": 0.5}),
    (f"fedlesam({L}) | {T}", FedLESAM, {"dkd": DKD}),
]
FIRST = [case for case in CASES if HEAVY not in case[0] and T not in case[0]]
RUNS = [
    *((*case, "plain") for case in CASES),
    *((*case, kind) for case in FIRST for kind in ("bn", "private bn")),
]


@pytest.mark.parametrize(
    ("text", "make", "settings", "kind"), RUNS, ids=[f"{text} {kind}" for text, _, _, kind in RUNS]
)
def test_rounds_equal_the_plain_computation(
    text: str, make: Make, settings: dict[str, Any], kind: str
) -> None:
    compare_rounds(text, make, settings, kind)


@pytest.mark.long
def test_the_cases_differ_from_each_other_and_from_fedavg() -> None:
    """Else agreement would mean little."""
    texts = [*(text for text, _, _ in FIRST), f"fedavg({L})", f"scaffold({L})"]
    last = ends(texts)
    for i, first in enumerate(last):
        for j, second in enumerate(last[i + 1 :], i + 1):
            assert (first - second).abs().max() > 1e-6, (texts[i], texts[j])


# --- laws

DATA, NET = clients(), network()
LOCAL = "epochs=2, batch_size=8, lr=0.1"


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("fedsam({}, rho=0)", "fedavg({})"),
        ("fedcm({}, alpha=1)", "fedavg({})"),
        ("mofedsam({}, rho=0, alpha=0.3)", "fedcm({}, alpha=0.3)"),
        ("fedexp({}, epsilon=1e9)", "fedavg({})"),
        ("fedacg({}, server_momentum=0, beta=0)", "fedavg({})"),
        ("fedacg({}, server_momentum=0, beta=0.5)", "fedprox({}, mu=0.5)"),
        ("fedgamma({}, rho=0)", "scaffold({})"),
        ("fedspeed({}, rho=0, alpha=0.5)", "feddyn({}, alpha=0.5)"),
        ("fedsmoo({}, rho=0, alpha=0.5)", "feddyn({}, alpha=0.5)"),
        ("fedlesam({}, rho=0)", "fedavg({})"),
    ],
)
@pytest.mark.parametrize("tail", ["", " | dkd(steps=2, batch_size=8)"])
def test_without_its_own_number_a_method_is_the_one_that_it_extends(
    text: str, same: str, tail: str
) -> None:
    found, expected = (
        run(each.format(LOCAL) + tail, DATA, NET, rounds=3).params for each in (text, same)
    )
    assert distance(found, expected) < 1e-12


def test_fedexp_goes_far_along_the_mean_of_moves_that_cancel() -> None:
    """Two clients with opposite labels: their mean move is short, so the step is long."""
    x, y = clients((40,), classes=2)[0]
    opposed = [(x, y), (x, 1 - y)]
    start = dict(network(classes=2).state_dict())
    net = network(classes=2)
    moves = [
        distance(start, run(f"{name}({LOCAL})", opposed, net, rounds=1).params)
        for name in ("fedavg", "fedexp")
    ]
    assert moves[1] > 2 * moves[0]


def test_fedlesam_perturbs_from_the_second_round_on() -> None:
    first, second = (
        distance(
            *(
                run(f"{name}({LOCAL})", DATA, NET, rounds=t).params
                for name in ("fedavg", "fedlesam")
            )
        )
        for t in (1, 2)
    )
    assert first == 0
    assert second > 1e-6


def test_private_tensors_stay_out_of_what_the_server_corrects() -> None:
    for name in ("fedcm", "fedexp", "fedacg", "fedgamma", "fedspeed", "fedsmoo", "fedlesam"):
        result = run(f"{name}({LOCAL}) | private(names='2.*')", DATA, NET, rounds=2)
        assert set(result.params) == {"0.weight", "0.bias"}


@pytest.mark.parametrize("name", ["fedcm", "mofedsam", "fedgamma"])
def test_methods_that_divide_by_the_length_of_steps_refuse_adam(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} weighs the steps of SGD"):
        parse(f"{name}(optimiser='adam')")


P = sum(parameter.numel() for parameter in NET.parameters())


@pytest.mark.parametrize(
    ("text", "up", "down"),
    [
        ("fedsam()", P, P + 1),
        ("fedcm()", P + 1, 2 * P + 1),  # K; the direction
        ("mofedsam()", P + 1, 2 * P + 1),
        ("fedexp()", P + 1, P + 1),  # the square of the move
        ("fedacg()", P, P + 1),  # the look-ahead in place of the model
        ("fedgamma()", 2 * P, 2 * P + 1),
        ("fedspeed()", P, P + 1),
        ("fedsmoo()", 2 * P, 2 * P + 1),  # mu_k; s
        ("fedlesam()", P, P + 1),
    ],
)
def test_bytes_are_those_of_the_tensors_that_travel(text: str, up: int, down: int) -> None:
    row = run(text, DATA, NET, rounds=1, cohort=2).history[0]
    assert (row["bytes_up"], row["bytes_down"]) == (2 * 8 * up, 2 * 8 * down)


# --- engines

ENGINE_TEXTS = [
    "fedsam(epochs=1, batch_size=8, momentum=0.5) | dkd(steps=2, batch_size=14)",
    "mofedsam(steps=3, batch_size=8)",
    "fedexp(steps=3, batch_size=8)",
    "fedacg(steps=3, batch_size=8)",
    "fedsmoo(steps=3, batch_size=8)",
    "fedlesam(steps=3, batch_size=8)",
]


@pytest.mark.long
@pytest.mark.parametrize("text", ENGINE_TEXTS)
def test_every_engine_agrees_with_serial_over_several_seeds_at_once(text: str) -> None:
    for norm in (False, True):
        expected, _ = engine_run(Serial, text, norm, seeds=(0, 1))
        for name, (engine, options, nets) in ENGINES.items():
            if norm in nets and not (name == "traced" and "dkd" in text):
                found, _ = engine_run(engine, text, norm, seeds=(0, 1), **options)
                assert apart(expected, found) < 1e-12, name


def test_a_sharpness_aware_step_leaves_running_statistics_as_one_pass_does() -> None:
    """The pass at the perturbed weights is not a second look at the batch."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)
    ).double()
    count = run("fedsam(epochs=3, batch_size=50)", DATA, net, rounds=1).state_dict()
    assert int(count["1.num_batches_tracked"]) == 3
