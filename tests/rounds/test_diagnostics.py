"""The quantities of the theory, against plain PyTorch."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax

from feddkd import InputError
from feddkd.data.batches import Reads
from feddkd.engines.batched.engine import Batched
from feddkd.engines.serial import Serial
from feddkd.method import Exchange
from feddkd.rounds.loop import choose
from plain import Plain
from small import clients, distance, network, run

DATA, NET = clients((12, 20, 33, 9)), network()
LOCAL, DKD = "fedavg(epochs=2, batch_size=8, lr=0.1)", "dkd(steps=3, batch_size=7, lr=0.3)"


def divergence(teachers: dict[int, nn.Module], net: nn.Module) -> float:
    def one(k: int, teacher: nn.Module) -> Tensor:
        p, q = log_softmax(teacher(DATA[k][0]), 1), log_softmax(net(DATA[k][0]), 1)
        return (p.exp() * (p - q)).sum(1).mean()

    return float(torch.stack([one(k, teacher) for k, teacher in teachers.items()]).mean().detach())


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def loss(net: nn.Module, k: int) -> float:
    return float(cross_entropy(net(DATA[k][0]), DATA[k][1]).detach())


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_the_theorys_quantities_equal_the_plain_computation(engine: str) -> None:
    plain = Plain(
        copy.deepcopy(NET),
        DATA,
        3,
        Reads(8, epochs=2),
        torch.optim.SGD,
        0.1,
        dkd={"steps": 3, "batch_size": 7, "lr": 0.3},
    )
    active = choose(3, 1, 4, 3)
    teachers = {k: plain.train_locally(k, 1) for k in active}
    plain.average(teachers)
    average = copy.deepcopy(plain.net)
    for j in (1, 2, 3):
        plain.distil(teachers, 1, j)
    own = [loss(teacher, k) for k, teacher in teachers.items()]
    found = run(
        f"{LOCAL} | {DKD}", DATA, NET, rounds=1, cohort=3, engine=engine, diagnostics=True
    ).history[0]["diagnostics"]
    assert found["client_loss"] == pytest.approx(own)
    assert found["L1"] == pytest.approx(sum(own) / 3)
    assert found["L2_average"] == pytest.approx(divergence(teachers, average))
    assert found["L2"] == pytest.approx(divergence(teachers, plain.net))
    assert found["bound"] == pytest.approx(found["L1"] + found["L2"])
    assert found["bound_average"] == pytest.approx(found["L1"] + found["L2_average"])
    assert found["moved"] == pytest.approx(float((flat(plain.net) - flat(average)).norm()))
    assert found["update_norms"] == pytest.approx(
        [float((flat(teacher) - flat(NET)).norm()) for teacher in teachers.values()]
    )
    assert found["global_loss"] == pytest.approx([loss(plain.net, k) for k in active])
    right = [float((plain.net(DATA[k][0]).argmax(1) == DATA[k][1]).double().mean()) for k in active]
    assert found["global_accuracy"] == pytest.approx(right)


@pytest.mark.parametrize("text", [LOCAL, f"{LOCAL} | {DKD}"])
def test_to_watch_a_run_does_not_change_it(text: str) -> None:
    plain, watched = (
        run(text, DATA, NET, cohort=2, rounds=3, diagnostics=asked) for asked in (False, True)
    )
    assert distance(plain.params, watched.params) == 0
    assert [{**row, "diagnostics": None} for row in watched.history] == [
        {**row, "diagnostics": None} for row in plain.history
    ]


def test_without_dkd_nothing_moved_since_the_average() -> None:
    found = run(LOCAL, DATA, NET, diagnostics=True).history[-1]["diagnostics"]
    assert found["moved"] == 0
    assert found["L2"] == found["L2_average"]


def test_the_first_steps_of_dkd_lower_l2() -> None:
    found = run(
        f"{LOCAL} | dkd(steps=5, batch_size=100, lr=0.05)", DATA, NET, diagnostics=True
    ).history[-1]["diagnostics"]
    assert found["L2"] < found["L2_average"]


@pytest.mark.parametrize("engine", [Serial, Batched])
def test_teachers_are_forgotten_once_they_have_been_diagnosed(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[set[str]] = []
    exchange = engine.exchange

    def watched(self: Any, what: Exchange, orders: Any) -> Any:
        replies = exchange(self, what, orders)
        if what.phase.name == "diagnose":
            kept.append({group for memo in self.memos.values() for group in memo})
        return replies

    monkeypatch.setattr(engine, "exchange", watched)
    run(f"{LOCAL} | {DKD}", DATA, NET, engine=engine.__name__.lower(), diagnostics=True)
    assert kept == [set(), set()]


def test_batch_norm_kept_at_home_is_part_of_both_models() -> None:
    net = nn.Sequential(
        nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3)
    ).double()
    data = clients((12, 20, 34))
    serial, batched = (
        run(
            f"fedbn(epochs=1, batch_size=8) | {DKD}", data, net, engine=name, diagnostics=True
        ).history[-1]["diagnostics"]
        for name in ("serial", "batched")
    )
    for key, value in serial.items():
        assert batched[key] == pytest.approx(value), key


def test_diagnostics_need_models_that_clients_train() -> None:
    with pytest.raises(InputError, match=r"diagnostics .* centralised"):
        run("centralised()", DATA, NET, diagnostics=True)
