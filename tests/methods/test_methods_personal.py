"""Personalised methods: against plain PyTorch, by their laws, on every engine."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from feddkd import InputError, parse, simulate
from feddkd.data.batches import Reads
from plain_comparison import ROUNDS, images, net_of
from plain_drift import Make
from plain_personal import (
    APFL,
    Ditto,
    FedALA,
    FedAMP,
    FedBABU,
    FedDecorr,
    FedFish,
    FedLC,
    FedProto,
    FedRep,
    FedRoD,
    FedRS,
    FineTuned,
    PerFedAvg,
    Personal,
    PFedMe,
    head_names,
)
from small import clients, distance, network, pooled, run
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


def is_any(net: nn.Module, name: str) -> bool:
    return True


HEAD, BODY, WHOLE = {"private": is_head}, {"private": is_body}, {"private": is_any}
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
    (f"fedavg({M}) | fine_tune(epochs=2, batch_size=8)", FineTuned, M_READS),
    (
        f"fedper({L}) | fine_tune(epochs=2, batch_size=8, part='body')",
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
    (f"per_fedavg({L}) | private(names='5.*')", PerFedAvg, HEAD),
    (f"fedrod({L})", FedRoD, {}),
    (f"fedrod({L}, {HEAVY})", FedRoD, HEAVILY),
    (f"fedrod({L}) | {T}", FedRoD, {"dkd": DKD}),
    (f"fedproto({L})", FedProto, WHOLE),
    (f"fedproto({L}, {HEAVY}, lam=5)", FedProto, {**HEAVILY, **WHOLE, "lam": 5}),
    (f"fedamp({L})", FedAMP, WHOLE),
    (
        f"fedamp({L}, {HEAVY}, lam=0.1, sigma=4, alpha=0.3)",
        FedAMP,
        {**HEAVILY, **WHOLE, "lam": 0.1, "sigma": 4.0, "alpha": 0.3},
    ),
    (f"fedala({L}, ala_epochs=2)", FedALA, {"ala_epochs": 2, "reads": FOUR}),
    (
        f"fedala({L}, {HEAVY}, ala_lr=30) | {T}",
        FedALA,
        {**HEAVILY, "ala_lr": 30.0, "reads": Reads(4, epochs=3), "dkd": DKD},
    ),
    (f"fedfish({M})", FedFish, {"reads": Reads(8, epochs=2)}),
    (
        f"fedfish({L}, {HEAVY}, epsilon=0.001) | {T}",
        FedFish,
        {**HEAVILY, "reads": Reads(4, epochs=3), "epsilon": 0.001, "dkd": {**DKD}},
    ),
    (f"fedlc({L})", FedLC, {}),
    (f"fedlc({L}, tau=0.3) | {T}", FedLC, {"tau": 0.3, "dkd": DKD}),
    (f"fedrs({L})", FedRS, {}),
    (f"fedrs({L}, alpha=0.1) | {T}", FedRS, {"alpha": 0.1, "dkd": DKD}),
    (f"feddecorr({M})", FedDecorr, M_READS),
    (f"feddecorr({M}, beta=2) | {T}", FedDecorr, {**M_READS, "beta": 2, "dkd": DKD}),
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
    start, data = net_of(kind), some_classes(images())
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
    assert (distance(result.params, shared) if shared else len(result.params)) < 1e-10
    assert len(result.private) >= 3 or not parse(text).personal
    for k in result.private:
        assert distance(result.state_dict(client=k), plain.judged(k).state_dict()) < 1e-10, k
    accuracies = [_accuracy(plain.judged(k), *pooled(data)) for k in range(len(data))]
    assert result.history[-1]["test_accuracy"] == pytest.approx(sum(accuracies) / len(accuracies))


def some_classes(data: list[Any]) -> list[Any]:
    """Return the same clients; the first two have examples of two classes each."""
    return [
        (x, y.clamp(min=1 - k, max=2 - k)) if k < 2 else (x, y) for k, (x, y) in enumerate(data)
    ]


def _accuracy(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    return float((net.eval()(x).argmax(1) == y).double().mean())


# --- laws

DATA, NET = clients(), network()
LOCAL = "epochs=2, batch_size=8, lr=0.1"


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("ditto({}, lam=0)", "local_only({})"),  # nothing pulls: each client trains alone
        ("apfl({}, alpha=1, adaptive=False)", "local_only({})"),
        ("fedproto({}, lam=0)", "local_only({})"),
        ("fedamp({}, lam=0)", "local_only({})"),
        ("fedper({})", "fedavg({}) | private(names='2.*')"),
        ("fedper({}, names='2.weight, 2.bias')", "fedper({})"),
        ("lg_fedavg({})", "fedavg({}) | private(names='!2.*')"),
        ("lg_fedavg({}, names='2.*')", "lg_fedavg({})"),
        ("fedbabu({}, names='2.*')", "fedbabu({})"),
    ],
)
def test_clients_are_judged_by_the_same_models(text: str, same: str) -> None:
    ours, theirs = (run(each.format(LOCAL), DATA, NET) for each in (text, same))
    for k in range(len(DATA)):
        assert distance(ours.state_dict(client=k), theirs.state_dict(client=k)) < 1e-12


@pytest.mark.parametrize(
    "text",
    [
        "ditto({})",
        "fedlc({}, tau=0)",
        "fedrs({}, alpha=1)",
        "feddecorr({}, beta=0)",
        "fedavg({}) | fine_tune(epochs=3)",
    ],
)
def test_the_shared_model_is_that_of_fedavg(text: str) -> None:
    ours, theirs = (run(each.format(LOCAL), DATA, NET) for each in (text, "fedavg({})"))
    assert distance(ours.params, theirs.params) < 1e-12
    for key in ("communications", "bytes_up", "bytes_down", "local_steps"):
        assert ours.history[-1][key] == theirs.history[-1][key]


@pytest.mark.parametrize("name", ["ditto", "apfl", "pfedme", "per_fedavg", "fedrod"])
def test_the_shared_model_can_be_judged_instead(name: str) -> None:
    text = f"{name}({LOCAL})"
    ours, theirs = (run(text, DATA, NET, evaluation=how) for how in ("global", "auto"))
    assert distance(ours.params, theirs.params) == 0
    assert ours.history[-1]["test_loss"] != theirs.history[-1]["test_loss"]
    net = copy.deepcopy(NET)
    net.load_state_dict(ours.params)
    assert ours.history[-1]["test_accuracy"] == pytest.approx(_accuracy(net, *pooled(DATA)))


def test_fedbabus_head_keeps_its_first_values_and_is_never_sent() -> None:
    result = run(f"fedbabu({LOCAL})", DATA, NET, engine="serial", cohort=3)
    assert set(result.params) == {"0.weight", "0.bias"}
    body = sum(result.params[name].numel() for name in result.params)
    assert result.history[-1]["bytes_up"] == 2 * 3 * 8 * body
    alone = run("fedbabu(steps=1, lr=0.1, tune_epochs=1, tune='body')", DATA, NET)
    for k in range(len(DATA)):
        assert torch.equal(alone.state_dict(client=k)["2.weight"], NET.state_dict()["2.weight"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fedrep(steps=3)", "steps does not go with head_epochs"),
        ("ditto() | fine_tune()", "personal model"),
        ("fedbabu() | fine_tune()", "personal model"),
        ("ditto() | private(names='2.*')", "does not go with private tensors"),
        ("fine_tune()", "put one that trains locally first"),
        ("fine_tune() | fedavg()", "put one that trains locally first"),
        ("fedproto() | dkd()", "whole models stay with the clients"),
        ("fedamp() | dkd()", "whole models stay with the clients"),
        ("fedamp(alpha=0.6)", "negative weight"),
        ("fedper(names='4.*')", "no tensor of the network"),
        ("fedper(names='*') | dkd()", "no shared model"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        run(text, DATA, NET)


@pytest.mark.parametrize("name", ["fedper", "lg_fedavg", "fedrep", "fedbabu", "fedrod", "fedproto"])
def test_a_network_without_a_linear_layer_has_no_head_by_default(name: str) -> None:
    net = nn.Sequential(nn.Conv1d(1, 3, 5), nn.Flatten()).double()
    data = [(x[:, None], y) for x, y in DATA]
    with pytest.raises(InputError, match="no linear"):
        run(f"{name}({LOCAL})", data, net)


@pytest.mark.parametrize("text", ["quantise()", "topk()", "local_bn()", "private(names='2.*')"])
def test_a_piece_alone_is_no_method(text: str) -> None:
    with pytest.raises(InputError, match="alone computes nothing"):
        run(text, DATA, NET)
