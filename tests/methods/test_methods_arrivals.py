"""ASO-Fed, whose server folds in clients one after another: against plain PyTorch, by its laws."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from feddkd import InputError
from feddkd.data.batches import Reads
from feddkd.method import World
from feddkd.methods import arrivals
from plain_arrivals import ASOFed, Turned
from plain_comparison import compare_rounds
from small import clients, distance, network, run
from test_reference import DKD, DKD_TEXT, SGD

DATA, NET = clients(), network()
L, ONE_STEP = "epochs=2, batch_size=4, lr=0.05", "steps=1, batch_size=100, lr=0.1"
HEAVY = "momentum=0.5, lr_decay=0.5, lam=0.2, beta=0.6"
HEAVILY = {"optimiser": partial(SGD, momentum=0.5), "lr_decay": 0.5, "lam": 0.2, "beta": 0.6}
FEATURES = {"feature_learning": True}


@pytest.fixture
def turned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients arrive in the order of the cohort, turned by the number of the round."""
    monkeypatch.setattr(arrivals, "generator", lambda key: Turned(key[-1]))


@pytest.mark.usefixtures("turned")
@pytest.mark.parametrize(
    ("text", "settings", "kind"),
    [
        (f"aso_fed({L})", {}, "plain"),
        (f"aso_fed({L})", {}, "bn"),
        (f"aso_fed({L}, {HEAVY})", HEAVILY, "plain"),
        (f"aso_fed({L}, feature_learning=True)", FEATURES, "bn"),
        (f"aso_fed({L}) | {DKD_TEXT.format('')}", {"dkd": DKD}, "plain"),
    ],
)
def test_three_rounds_equal_the_plain_computation(
    text: str, settings: dict[str, Any], kind: str
) -> None:
    plain: Any = compare_rounds(text, ASOFed, settings, kind)
    assert max(map(max, plain.delays.values())) > 3  # a model older than a cohort's arrivals


@pytest.mark.usefixtures("turned")
def test_a_client_that_comes_seldom_steps_further() -> None:
    data = clients(sizes=(6, 7, 8, 9, 10, 11))
    net = network().train()
    assert isinstance(net, nn.Sequential)
    plain = ASOFed(net, data, 3, Reads(100, steps=1), SGD, 0.1)
    plain.run(rounds=4, cohort=6)
    ours = run(f"aso_fed({ONE_STEP})", data, NET, rounds=4)
    assert any(sum(past) / len(past) > torch.e for past in plain.delays.values())
    assert distance(ours.params, plain.net.state_dict()) < 1e-10


@pytest.mark.parametrize("rounds", [1, 2])
def test_one_step_of_all_clients_is_fedavgs_in_the_first_round_only(rounds: int) -> None:
    """All begin with one model, and there is no earlier gradient: the order has no effect."""
    ours, average = (
        run(f"{name}({ONE_STEP})", DATA, NET, rounds=rounds) for name in ("aso_fed", "fedavg")
    )
    apart = distance(ours.params, average.params)
    assert apart < 1e-12 if rounds == 1 else apart > 1e-6


def test_each_client_is_sent_one_model_and_one_factor() -> None:
    ours, average = (run(f"{name}({L})", DATA, NET).history[-1] for name in ("aso_fed", "fedavg"))
    assert ours["bytes_up"] == average["bytes_up"]
    assert ours["bytes_down"] == average["bytes_down"] + 2 * 3 * 8


def test_the_order_of_arrivals_follows_the_key_and_changes_with_the_round() -> None:
    ledger = arrivals.open_ledger(World(clients=9))
    rates = {"clients": torch.tensor([1, 2, 4, 5, 8]), "examples": torch.full((5,), 10)}
    first, after = arrivals.note_arrivals(ledger, rates)
    again, _ = arrivals.note_arrivals(ledger, rates)
    second, last = arrivals.note_arrivals(after, rates)
    assert first == again != second
    assert sorted(first) == sorted(second) == list(range(5))
    assert int(last["now"]) == 10
    assert last["delays"].sum() == last["received"].sum() == 6 + 7 + 8 + 9 + 10


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("aso_fed(optimiser='adam')", "optimiser='adam'"),
        ("aso_fed(feature_learning=True) | private(names='*.weight')", "feature_learning"),
        ("aso_fed(beta=1.5)", "beta"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        run(text, DATA, NET)
