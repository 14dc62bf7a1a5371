"""Attacks: who is malicious, what they send, what they train on, and what it does."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from feddkd import Experiment, InputError
from feddkd.data.federation import Federation
from feddkd.models.functional import functional
from feddkd.rounds.attacks import ATTACKS, find_attack
from feddkd.rounds.attacks.of_data import patched
from feddkd.rounds.attacks.rule import Malicious
from feddkd.rounds.selection import find_selection
from plain_robust import Largest, PlainRobust, lying
from playing import job_of, play_job
from small import Pair, clients, distance, federation, network, run

LOCAL = "epochs=1, batch_size=8, lr=0.1"
DKD = "dkd(steps=2, batch_size=8, lr=0.3"
FEDDKD = f"fedavg({LOCAL}) | {DKD})"
SIZES = (12, 20, 33, 16, 9)
UPLOADS = {"sign_flip": ("scale", 2.0), "scaling": ("factor", 10.0), "gaussian": ("deviation", 0.3)}
SPELLED = [
    "none()",
    "label_flip(share=0.4)",
    "backdoor(clients='0', target=1)",
    *(f"{name}(clients='1, 3', {option}={much})" for name, (option, much) in UPLOADS.items()),
]


def plain(net: nn.Module, data: list[Pair], **options: Any) -> PlainRobust:
    found = PlainRobust.of(net, data, steps=2, lr=0.1, dkd_lr=0.3, **options)
    found.run(rounds=3, cohort=4)
    return found


# --- who


def test_the_seed_draws_a_share_of_the_clients_and_a_list_names_them() -> None:
    drawn = [Malicious(share=0.3).among(10, seed) for seed in range(50)]
    assert all(len(set(one)) == 3 and one == sorted(one) for one in drawn)
    assert set().union(*drawn) == set(range(10))
    assert drawn[4] == Malicious(share=0.3).among(10, 4)
    assert Malicious(clients="7, 2-4").among(10, 0) == [2, 3, 4, 7]


# --- uploads, against plain PyTorch


@pytest.mark.parametrize("engine", ["serial", "batched", "pool"])
@pytest.mark.parametrize("kind", UPLOADS)
def test_a_run_is_that_of_the_plain_loop(kind: str, engine: str) -> None:
    net, data, (option, much) = network(), clients(SIZES), UPLOADS[kind]
    like: dict[str, Tensor] = dict(net.named_parameters())
    expected = plain(net, data, attack=lying(kind, (1, 3), like, much))
    attack = f"{kind}(clients='1, 3', {option}={much})"
    ours = run(FEDDKD, data, net, rounds=3, cohort=4, engine=engine, attack=attack)
    assert distance(ours.params, expected.params) < 1e-10


def test_attack_compression_and_defence_come_in_this_order() -> None:
    net, data = network(), clients(SIZES)
    expected = plain(
        net,
        data,
        attack=lying("sign_flip", (1,), {}, 5.0),
        compress=Largest(0.3),
        defence={"gather": "krum", "faulty": 0.25},
    )
    rule = "gather='krum', faulty=0.25"
    ours = run(
        f"fedavg({LOCAL}, {rule}) | {DKD}, {rule}) | topk(share=0.3)",
        data,
        net,
        rounds=3,
        cohort=4,
        attack="sign_flip(clients='1', scale=5.0)",
    )
    assert distance(ours.params, expected.params) < 1e-10


def test_nobody_lies_beyond_a_bound_that_the_method_sets() -> None:
    net, data = network(), clients((20,))
    attack = "scaling(clients='0', factor=1e6)"
    far = run(f"fedavg({LOCAL}, clip=0.1)", data, net, rounds=1, attack=attack).params
    move = torch.cat([(far[n] - t).flatten() for n, t in net.state_dict().items()])
    assert float(move.norm()) == pytest.approx(0.1)


def test_honest_clients_send_the_same_bits() -> None:
    net, data = network(), clients(SIZES)
    for method in (f"fedavg({LOCAL})", f"fedavg({LOCAL}, clip=0.05)", f"scaffold({LOCAL})"):
        honest = run(method, data, net, cohort=2)
        aside = run(method, data, net, cohort=2, attack="sign_flip(clients='4')")
        seen = {client for row in honest.history for client in row["clients"]}
        assert 4 not in seen
        assert distance(aside.params, honest.params) == 0
        assert aside.history == honest.history


# --- data


def test_flipped_labels_are_those_of_the_formula() -> None:
    net, data = network(), clients(SIZES)
    other = [(x, 2 - y) if k in (0, 2) else (x, y) for k, (x, y) in enumerate(data)]
    ours = run(FEDDKD, data, net, rounds=3, cohort=4, attack="label_flip(clients='0, 2')")
    assert distance(ours.params, plain(net, other).params) < 1e-10


def images(count: int = 60, seed: int = 0) -> Pair:
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (count,), generator=draw)
    x = 0.3 * torch.rand(count, 1, 6, 6, generator=draw, dtype=torch.float64)
    x[torch.arange(count), 0, y, :3] += 0.5
    return x, y


def poisoned(text: str, data: list[Pair]) -> Federation:
    return find_attack(text).federation(federation(data), seed=3)


def test_a_backdoor_marks_a_share_of_the_examples_of_malicious_clients_alone() -> None:
    data = [images(seed=k) for k in range(3)]
    found = poisoned("backdoor(clients='1', target=2, size=2, poisoned=0.25)", data)
    for k, (x, y) in enumerate(data):
        own_x, own_y = found.x[found.train[k]], found.y[found.train[k]]
        marked = (own_x[:, 0, -2:, -2:] == 1).all(-1).all(-1)
        assert int(marked.sum()) == (15 if k == 1 else 0)
        assert torch.equal(own_x[~marked], x[~marked])
        assert torch.equal(own_y[~marked], y[~marked])
        assert (own_y[marked] == 2).all()
        assert torch.equal(own_x[marked], patched(x[marked], 2, 1.0))


def test_clients_that_hold_the_same_examples_stay_honest() -> None:
    shared = federation([images(), images(seed=1)])
    both = np.concatenate([shared.train[0], shared.train[1]])
    shared = Federation(**{**vars(shared), "train": (both, both)})
    found = find_attack("label_flip(clients='0')").federation(shared, 3)
    assert torch.equal(found.y[found.train[1]], shared.y[both])
    assert torch.equal(found.y[found.train[0]], 2 - shared.y[both])


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_a_backdoor_opens_and_its_success_is_counted(engine: str) -> None:
    data = [images(seed=k) for k in range(4)]
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).double()
    text = f"fedavg({LOCAL.replace('epochs=1', 'epochs=5')})"
    attack = "backdoor(share=0.5, target=2, size=2, poisoned=0.5)"
    row = run(text, data, net, rounds=6, engine=engine, attack=attack).history[-1]
    params = run(text, data, net, rounds=6, engine=engine, attack=attack).params
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    net.load_state_dict(params)
    with torch.no_grad():
        hits = net(patched(x[y != 2], 2, 1.0)).argmax(1) == 2
    assert row["attack_success"] == pytest.approx(float(hits.double().mean()))
    assert row["attack_success"] > 0.9
    assert row["test_accuracy"] > 0.9
    assert "attack_success" not in run(text, data, net, rounds=1).history[-1]


# --- what a defence is worth


def test_a_defence_keeps_a_model_that_a_mean_loses() -> None:
    data = [images(seed=k) for k in range(5)]
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).double()
    attack = "sign_flip(clients='0', scale=20.0)"

    def accuracy(rule: str) -> float:
        method = f"fedavg(epochs=5, batch_size=8, lr=0.1{rule})"
        return float(run(method, data, net, rounds=6, attack=attack).history[-1]["test_accuracy"])

    assert accuracy("") < 0.5
    for rule in ("krum", "multi_krum", "geometric", "median"):
        share = ", faulty=0.2" if "krum" in rule else ""
        assert accuracy(f", gather='{rule}'{share}") > 0.9


@pytest.mark.parametrize("attack", ["label_flip(share=0.4)", "gaussian(share=0.4, deviation=0.1)"])
def test_seeds_in_lock_step_have_their_own_liars_and_cohorts(attack: str) -> None:
    data, net = clients(SIZES), network()
    model, method = functional(net), f"{FEDDKD} | topk(share=0.2)"
    lie, select = find_attack(attack), find_selection("oort(exploration=0.5)")

    def played(engine: str, seeds: list[int]) -> list[Any]:
        federations, starts = [federation(data)] * len(seeds), [model.start()] * len(seeds)
        options: dict[str, Any] = {"rounds": 3, "cohort": 3, "attack": lie, "selection": select}
        job = job_of(model, method, federations, starts, seeds, **options)
        runs, _ = play_job(replace(job, method=lie.on(job.method)), engine)
        return [run.state["params"] for run in runs]

    together = played("batched", [3, 4])
    for seed, params in zip((3, 4), together, strict=True):
        assert distance(dict(params), dict(played("serial", [seed])[0])) < 1e-10
    assert distance(dict(together[0]), dict(together[1])) > 1e-3


# --- texts


@pytest.mark.parametrize("text", SPELLED)
def test_an_attack_reads_back_from_its_text(text: str) -> None:
    assert find_attack(find_attack(text).canonical) == find_attack(text)


def test_no_attack_stays_out_of_digests() -> None:
    plainly = Experiment(method="fedavg()")
    assert plainly.digest == Experiment(method="fedavg()", attack="none").digest
    assert plainly.digest != Experiment(method="fedavg()", attack="sign_flip()").digest
    assert "attack" not in plainly.canonical
    assert {find_attack(text).calls[0].name for text in SPELLED} == set(ATTACKS)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"attack": "sign_flips()"}, "sign_flip"),
        ({"attack": "sign_flip(clients='10')"}, "no client 10"),
        ({"attack": "sign_flip()", "method": "feddistill()"}, "uploads none"),
        ({"attack": "sign_flip()", "method": "fedma()"}, "shapes"),
        ({"attack": "sign_flip()", "method": "fedavg() | dkd(steps='auto')"}, "auto"),
        ({"attack": "label_flip()", "task": "regression"}, "label"),
    ],
)
def test_what_makes_no_sense_is_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Experiment(**{"method": "fedavg()", "clients": 10, **keys})


@pytest.mark.parametrize(
    ("attack", "words"),
    [("backdoor(size=7)", "does not fit"), ("backdoor(target=3)", "no class 3")],
)
def test_a_backdoor_that_does_not_fit_the_data_is_refused(attack: str, words: str) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).double()
    with pytest.raises(InputError, match=words):
        run("fedavg()", [images()], net, attack=attack)
