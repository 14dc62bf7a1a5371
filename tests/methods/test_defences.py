"""Defences: each is its paper's formula, and holds where a mean does not."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor

from feddkd import InputError
from feddkd.methods import parse
from feddkd.methods.aggregation import Gathering
from feddkd.methods.defences import centred_clipping, geometric_median, krum, multi_krum
from feddkd.testing import check_method
from plain_robust import PlainRobust, plain_defence
from small import clients, distance, network, run

LOCAL = "epochs=1, batch_size=8, lr=0.1"
RULES = [
    "gather='krum', faulty=0.3",
    "gather='multi_krum', faulty=0.3",
    "gather='geometric'",
    "gather='centred', radius=0.1",
]
NOTHING = torch.zeros(6, dtype=torch.float64)


def drawn(m: int, seed: int, width: int = 6) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(m, width, generator=draw, dtype=torch.float64)


@given(m=st.integers(1, 9), faulty=st.integers(0, 4), seed=st.integers(0, 10**6))
def test_krum_and_multi_krum_are_the_papers_loops(m: int, faulty: int, seed: int) -> None:
    faulty, updates = min(faulty, (m - 1) // 2), drawn(m, seed)
    for name, ours in (("krum", krum), ("multi_krum", multi_krum)):
        expected = plain_defence(name, updates.numpy(), NOTHING.numpy(), faulty=faulty)
        assert np.allclose(ours(updates, NOTHING, faulty=faulty), expected, rtol=1e-12)


@given(m=st.integers(1, 9), seed=st.integers(0, 10**6))
def test_multi_krum_without_faults_is_the_mean(m: int, seed: int) -> None:
    updates = drawn(m, seed)
    assert torch.equal(multi_krum(updates, NOTHING, faulty=0), updates.mean(0))


@settings(max_examples=20)
@given(m=st.integers(5, 9), seed=st.integers(0, 10**6))
def test_the_geometric_median_has_the_least_sum_of_distances(m: int, seed: int) -> None:
    updates = drawn(m, seed, width=3)

    def total(point: "np.typing.NDArray[np.float64]") -> float:
        return float(np.linalg.norm(updates.numpy() - point, axis=1).sum())

    best = minimize(total, updates.mean(0).numpy(), method="Nelder-Mead", tol=1e-10).fun
    assert total(geometric_median(updates, NOTHING[:3]).numpy()) <= best * (1 + 1e-3)


@given(m=st.integers(1, 9), seed=st.integers(0, 10**6))
def test_centred_clipping_with_a_wide_radius_is_the_mean(m: int, seed: int) -> None:
    updates, last = drawn(m, seed), drawn(1, seed + 1)[0]
    assert torch.allclose(centred_clipping(updates, last, radius=1e3), updates.mean(0))


@given(m=st.integers(1, 9), seed=st.integers(0, 10**6), radius=st.floats(1e-3, 1e3))
def test_nobody_moves_centred_clipping_further_than_the_radius(
    m: int, seed: int, radius: float
) -> None:
    last = drawn(1, seed + 1)[0]
    moved = centred_clipping(1e9 * drawn(m, seed), last, radius=radius) - last
    assert moved.norm() <= radius * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_a_few_liars_move_a_defence_little_and_a_mean_far(rule: str) -> None:
    honest = 1 + 0.1 * drawn(7, 1)
    lies = -1e6 * drawn(3, 2).abs()
    together = torch.cat([lies, honest])
    options = dict(part.strip().split("=") for part in rule.split(","))
    how = Gathering(**{key: eval(value) for key, value in options.items()})
    found = how.defence(10)(together, honest.mean(0) + 0.01)
    assert (found - honest.mean(0)).norm() < 0.5
    assert (together.mean(0) - honest.mean(0)).norm() > 1e4


# --- in a run, against plain PyTorch


@pytest.mark.parametrize("engine", ["serial", "batched", "pool"])
@pytest.mark.parametrize("rule", RULES)
def test_a_run_is_that_of_the_plain_loop(rule: str, engine: str) -> None:
    net, data = network(), clients((12, 20, 33, 16, 9))
    options = {key: eval(value) for key, value in (p.strip().split("=") for p in rule.split(","))}
    plain = PlainRobust.of(net, data, steps=2, lr=0.1, dkd_lr=0.3, defence=options)
    plain.run(rounds=3, cohort=4)
    method = f"fedavg({LOCAL}, {rule}) | dkd(steps=2, batch_size=8, lr=0.3, {rule})"
    ours = run(method, data, net, rounds=3, cohort=4, engine=engine).params
    assert distance(ours, plain.params) < 1e-10


@pytest.mark.long
def test_methods_with_defences_obey_the_laws() -> None:
    check_method(
        "fedavg(epochs=1, batch_size=8, gather='centred', radius=0.1)"
        " | dkd(steps=2, batch_size=8, gather='multi_krum')"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fedavg(gather='centred')", "radius"),
        ("fedavg(radius=1.0)", "centred"),
        ("fedavg(gather='krum', faulty=0.5)", "faulty"),
        ("fedavg(clip=1.0, noise=1.0, gather='krum')", "krum"),
        ("fedavg() | dkd(steps='auto', gather='geometric')", "auto"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse(text)
