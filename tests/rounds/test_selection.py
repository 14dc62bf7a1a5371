"""Selections: who is asked in a round, what it costs, and that it is the same everywhere."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from feddkd import Experiment, InputError
from feddkd.randomness import generator
from feddkd.rounds.loop import choose
from feddkd.rounds.selection import SELECTIONS, find_selection
from feddkd.rounds.selection.by_loss import score
from feddkd.rounds.selection.rule import Known, Selection
from feddkd.runs.runner import execute
from interrupted import OFTEN, content, experiment
from plain_robust import PlainRobust
from small import clients, distance, network, run

LOCAL = "epochs=1, batch_size=8, lr=0.1"
FEDDKD = f"fedavg({LOCAL}) | dkd(steps=2, batch_size=8, lr=0.3)"
SIZES = (12, 20, 33, 16, 9, 27)
SPELLED = [
    "uniform()",
    "by_size()",
    "round_robin()",
    "by_group(groups='0-2; 3-5')",
    "power_of_choice(candidates=4)",
    "oort(exploration=0.5)",
]


def cohort_of(text: str, t: int, sizes: Sequence[int] = SIZES, m: int = 3, seed: int = 0) -> Any:
    return find_selection(text).draw(Known(seed, t, sizes, m, {}))


# --- rules


@given(seed=st.integers(0, 10**6), t=st.integers(1, 50), m=st.integers(1, 6))
def test_every_rule_draws_different_clients_of_the_federation(seed: int, t: int, m: int) -> None:
    for text in ("uniform()", "by_size()", "round_robin()", "by_group(groups='0-5')"):
        drawn = cohort_of(text, t, m=m, seed=seed)
        assert len(set(drawn.tolist())) == m
        assert set(drawn.tolist()) <= set(range(6))
        assert (drawn == cohort_of(text, t, m=m, seed=seed)).all()


def test_uniform_draws_are_those_of_before() -> None:
    for t in range(1, 9):
        drawn = generator(("cohort", 5, t)).choice(20, size=7, replace=False)
        assert choose(5, t, 20, 7) == tuple(sorted(drawn.tolist()))
        assert sorted(cohort_of("uniform()", t, [1] * 20, 7, 5)) == sorted(drawn.tolist())


def test_large_clients_are_drawn_in_proportion() -> None:
    draws = 3000
    first = Counter(int(cohort_of("by_size()", t, (1, 3, 6), 1)[0]) for t in range(draws))
    assert [first[k] / draws for k in range(3)] == pytest.approx([0.1, 0.3, 0.6], abs=0.04)
    pairs = Counter(tuple(cohort_of("by_size()", t, (1, 3, 6), 2)) for t in range(draws))
    # P(2, then 1) = 6/10 * 3/4
    assert pairs[2, 1] / draws == pytest.approx(0.45, abs=0.04)


def test_round_robin_asks_everybody_equally_often() -> None:
    asked = Counter(int(k) for t in range(1, 13) for k in cohort_of("round_robin()", t, m=4))
    assert set(asked.values()) == {12 * 4 // 6}


def test_groups_share_a_cohort_and_what_is_left_over_goes_round() -> None:
    rule = "by_group(groups='0-2; 3-5')"
    shares = [sum(k < 3 for k in cohort_of(rule, t)) for t in range(1, 5)]
    assert shares == [2, 1, 2, 1]
    assert all(sum(k < 3 for k in cohort_of(rule, t, m=4)) == 2 for t in range(1, 5))


def test_scores_are_those_of_oort() -> None:
    utility, last = np.array([1.0, 5.0, 3.0, 100.0]), np.array([1.0, 2.0, 3.0, 4.0])
    top = np.quantile(utility, 0.95)
    expected = [
        (min(u, top) - 1) / 99 + np.sqrt(0.1 * np.log(7) / at)
        for u, at in zip(utility, last, strict=True)
    ]
    assert np.allclose(score(utility, last, 7), expected)


def test_oort_exploits_what_it_knows_and_explores_what_it_does_not() -> None:
    rule = find_selection("oort(exploration=0.5, decay=1.0, least=0.5)")
    utility = np.array([9.0, 8.9, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    notes = {"utility": utility, "last": np.array([3.0, 3, 3, 3, 0, 0, 0, 0])}
    seen = [set(rule.draw(Known(s, 4, SIZES, 4, notes)).tolist()) for s in range(40)]
    assert all({0, 1} <= drawn and len(drawn & {4, 5, 6, 7}) == 2 for drawn in seen)
    assert set().union(*seen) == {0, 1, 4, 5, 6, 7}


# --- in a run, against plain PyTorch


def losses(plain: PlainRobust, k: int) -> torch.Tensor:
    x, y = plain.clients[k]
    with torch.no_grad():
        return cross_entropy(plain.net(x), y, reduction="none")


def plain_power_of_choice(plain: PlainRobust, t: int, m: int) -> list[int]:
    """Return the cohort by the paper's three steps."""
    waiting = generator(("cohort", plain.seed, t)).exponential(size=len(plain.clients))
    sizes = np.array([len(y) for _, y in plain.clients])
    candidates = sorted(np.argsort(waiting / sizes)[:4].tolist())
    return sorted(sorted(candidates, key=lambda k: -float(losses(plain, k).mean()))[:m])


def plain_oort() -> Callable[[PlainRobust, int, int], list[int]]:
    utility: dict[int, float] = {}
    last: dict[int, int] = {}

    def select(plain: PlainRobust, t: int, m: int) -> list[int]:
        random = generator(("cohort", plain.seed, t))
        share = max(0.5 * 0.98**t, 0.2)
        new = [k for k in range(len(plain.clients)) if k not in last]
        known = sorted(last)
        count = max(min(int(m * (1 - share)), len(known)), m - len(new))
        chosen = random.choice(new, size=m - count, replace=False).tolist()
        if count:
            u, at = np.array([utility[k] for k in known]), np.array([last[k] for k in known])
            scores = score(u, at.astype(float), t)
            pool = [i for i in range(len(known)) if scores[i] >= 0.95 * sorted(scores)[-count]]
            waiting = random.exponential(size=len(pool)) / np.maximum(scores[pool], 1e-12)
            chosen += [known[pool[i]] for i in np.argsort(waiting)[:count]]
        for k in chosen:
            each = losses(plain, k)
            utility[k] = len(each) * float((each.square().sum() / len(each)).sqrt())
            last[k] = t
        return sorted(chosen)

    return select


@pytest.mark.parametrize("engine", ["serial", "batched", "pool"])
@pytest.mark.parametrize("rule", ["power_of_choice(candidates=4)", "oort(exploration=0.5)"])
def test_a_run_is_that_of_the_plain_loop(rule: str, engine: str) -> None:
    net, data = network(), clients(SIZES)
    select = plain_power_of_choice if "power" in rule else plain_oort()
    plain = PlainRobust.of(net, data, steps=2, lr=0.1, dkd_lr=0.3, select=select)
    plain.run(rounds=6, cohort=3)
    ours = run(FEDDKD, data, net, rounds=6, cohort=3, engine=engine, selection=rule)
    assert [tuple(row["clients"]) for row in ours.history] == plain.cohorts
    assert distance(ours.params, plain.params) < 1e-10


def test_asking_costs_a_communication_and_its_bytes() -> None:
    net, data = network(), clients(SIZES)
    size = 8 * sum(p.numel() for p in net.parameters())
    plain = run(FEDDKD, data, net, cohort=3).history[-1]
    for rule, asked in (("power_of_choice(candidates=5)", 5), ("oort()", 3)):
        row = run(FEDDKD, data, net, cohort=3, selection=rule).history[-1]
        assert row["communications"] == plain["communications"] + 2
        assert row["bytes_down"] == plain["bytes_down"] + 2 * asked * size
        assert row["bytes_up"] == plain["bytes_up"] + 2 * asked * 8
        assert row["local_steps"] > 0
        assert len(row["asked"]) == asked
        assert set(row["clients"]) <= set(row["asked"])


@pytest.mark.parametrize(
    "keys",
    [{"selection": "oort(exploration=0.5)"}, {"attack": "gaussian(share=0.4, deviation=0.01)"}],
    ids=["selection", "attack"],
)
def test_a_stopped_run_continues_to_the_same_bits(keys: dict[str, str], tmp_path: Path) -> None:
    whole = experiment(**keys)
    execute([whole], out=tmp_path / "whole", engine="serial", every=OFTEN)
    execute([whole], out=tmp_path / "parts", engine="serial", every=OFTEN, until=3)
    execute([whole], out=tmp_path / "parts", engine="serial", every=OFTEN)
    assert content(tmp_path / "parts") == content(tmp_path / "whole")


# --- texts


@pytest.mark.parametrize("text", SPELLED)
def test_a_rule_reads_back_from_its_text(text: str) -> None:
    assert find_selection(find_selection(text).canonical) == find_selection(text)


def test_the_usual_rule_stays_out_of_digests() -> None:
    plain = Experiment(method="fedavg()")
    assert plain.digest == Experiment(method="fedavg()", selection="uniform").digest
    assert plain.digest != Experiment(method="fedavg()", selection="by_size()").digest
    assert "selection" not in plain.canonical
    assert {find_selection(text).calls[0].name for text in SPELLED} == set(SELECTIONS)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"selection": "power_of_choices()"}, "power_of_choice"),
        ({"selection": "power_of_choice(candidates=2)", "cohort": 5}, "candidates"),
        ({"selection": "power_of_choice(candidates=11)", "cohort": 5}, "candidates"),
        ({"selection": "by_group(groups='0-3; 5-9')"}, "each of the clients"),
        ({"selection": "by_group(groups='0-8; 9')"}, "one has 1"),
        ({"selection": "by_group(groups='nine')"}, "ranges"),
        ({"selection": "by_group(groups='0-5, 3-9')"}, "twice"),
        ({"selection": "by_size()", "method": "fedavg(clip=1.0, noise=1.0)"}, "uniformly"),
    ],
)
def test_what_makes_no_sense_is_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Experiment(**{"method": "fedavg()", "clients": 10, **keys})


def test_a_selection_of_another_kind_is_refused() -> None:
    assert isinstance(find_selection(find_selection("oort")), Selection)
    with pytest.raises(InputError, match="must be a text"):
        find_selection(3)
