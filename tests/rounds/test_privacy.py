"""Epsilon: the accountant's own figures, independent formulas, and what the rows of a run say."""

import logging
import math
import sys
from itertools import combinations, islice
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld, rdp
from rich.console import Console
from scipy.integrate import quad
from scipy.stats import norm

from feddkd import Experiment, InputError
from feddkd.methods import parse
from feddkd.reports.tables import table
from feddkd.rounds.privacy import epsilons, ledger, multiplier
from feddkd.runs.record import find
from feddkd.runs.runner import execute
from small import clients, network, run

PRIVATE = (
    "fedavg(epochs=1, batch_size=8, clip=1.0, noise=1.1) | dkd(steps=3, batch_size=8, clip=0.5,"
    " noise=2.0%s)"
)


def last(multipliers: list[float], clients: int, cohort: int, delta: float) -> float:
    return list(epsilons(multipliers, clients, cohort, delta))[-1]


def delta_of_gaussians(epsilon: float, multipliers: list[float]) -> float:
    """The whole trade-off of composed Gaussian mechanisms (Balle, Wang 2018; Dong, Roth, Su 2022):
    mu^2 = sum 1 / sigma_i^2.
    """
    mu = math.sqrt(sum(z**-2 for z in multipliers))
    return float(
        norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    )


@pytest.mark.parametrize("delta", [1e-6, 1e-2])
@pytest.mark.parametrize("rounds", [1, 40])
def test_with_everybody_epsilon_is_that_of_the_closed_form(rounds: int, delta: float) -> None:
    releases = [5.0, *[20.0] * 3]
    method = parse("fedavg(clip=1.0, noise=5.0) | dkd(steps=3, clip=1.0, noise=20.0)")
    found = last([multiplier(method, 1)] * rounds, 7, 7, delta)
    assert delta_of_gaussians(found, [z / 2 for z in releases] * rounds) == pytest.approx(
        delta, rel=1e-6
    )


def test_it_is_what_the_accountants_say_themselves_of_the_releases_one_by_one() -> None:
    rounds, delta, releases = 25, 1e-4, [4.0, *[9.0] * 3]
    z = multiplier(parse("fedavg(clip=1.0, noise=4.0) | dkd(steps=3, clip=1.0, noise=9.0)"), 1)
    round = dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(z / 2) for z in releases])
    renyi = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    renyi.compose(dp_accounting.SampledWithoutReplacementDpEvent(100, 10, round), rounds)
    assert last([z] * rounds, 100, 10, delta) == pytest.approx(renyi.get_epsilon(delta))
    losses = pld.PLDAccountant()
    losses.compose(round, rounds)
    assert last([z] * rounds, 100, 100, delta) == pytest.approx(losses.get_epsilon(delta), rel=1e-3)


@pytest.mark.parametrize(
    ("size", "cohort", "tight"), [(1, 1, True), (2, 1, False), (4, 2, False), (10, 1, False)]
)
@pytest.mark.parametrize("z", [0.8, 3.0])
def test_no_two_federations_are_easier_to_tell_apart_than_it_promises(
    size: int, cohort: int, tight: bool, z: float
) -> None:
    """One client's update is clip = 1 here and -1 there, the others' are 0: the densities are
    known, and so is the true delta.
    """
    delta = 1e-2
    epsilon = last([z], size, cohort, delta)
    sums = [
        sum(1.0 for client in drawn if client == 0) for drawn in combinations(range(size), cohort)
    ]

    def density(x: float, sign: float) -> float:
        return float(np.mean([norm.pdf(x, sign * centre, z) for centre in sums]))

    def excess(x: float) -> float:
        return max(density(x, 1) - math.exp(epsilon) * density(x, -1), 0.0)

    true = quad(excess, -12 * z, 12 * z, limit=400, points=[0])[0]
    assert true <= delta * (1 + 1e-6)
    assert not tight or true == pytest.approx(delta, rel=1e-3)


def test_sampling_gives_away_less_and_more_rounds_more() -> None:
    by_cohort = [last([4.0] * 10, 100, cohort, 1e-3) for cohort in (1, 10, 50, 99, 100)]
    assert by_cohort == sorted(by_cohort)
    assert by_cohort[-2] <= by_cohort[-1]
    grows = list(epsilons([4.0] * 10, 100, 10, 1e-3))
    assert grows == sorted(grows)


def test_a_round_without_releases_costs_nothing_and_a_bare_one_everything() -> None:
    assert list(epsilons([math.inf, math.inf], 10, 2, 1e-3)) == [0.0, 0.0]
    first, second, third = epsilons([4.0, math.inf, 0.0], 10, 2, 1e-3)
    assert 0 < first == second
    assert third == math.inf


def test_rounds_before_the_warm_up_is_over_release_the_update_alone() -> None:
    method = parse(PRIVATE % ", warmup=2")
    assert [multiplier(method, t) for t in (1, 2)] == [pytest.approx(1.1)] * 2
    assert multiplier(method, 3) == pytest.approx((1.1**-2 + 3 * 2.0**-2) ** -0.5)


@pytest.mark.parametrize("noise", [1e-9, 1e-6, 1e-3, 1e6])
def test_absurd_noise_has_an_epsilon_too(noise: float) -> None:
    z = multiplier(
        parse(f"fedavg(clip=1.0, noise={noise}) | dkd(steps=2, clip=1.0, noise={noise})"), 1
    )
    first, second = epsilons([z, z], 10, 2, 1e-3)
    assert 0 <= first <= second
    assert (second == math.inf) is (noise < 1e-6)


def test_only_what_clients_upload_counts() -> None:
    quiet = "fedavg(clip=1.0, noise=1.1) | server_adam()"
    assert multiplier(parse(quiet), 1) == pytest.approx(1.1)
    assert multiplier(
        parse("data_sharing(warmup_steps=3, clip=1.0, noise=1.1)"), 1
    ) == pytest.approx(1.1)
    for bare in ("fedavg() | dkd(clip=1.0, noise=1.0)", "fedavg(clip=1.0, noise=1.0) | dkd()"):
        assert multiplier(parse(bare), 1) == 0


# --- runs


def test_every_row_says_what_has_been_spent(caplog: pytest.LogCaptureFixture) -> None:
    rows = run(PRIVATE % "", clients((9, 9, 9, 9)), network(), cohort=2, rounds=3).history
    expected = list(epsilons([multiplier(parse(PRIVATE % ""), 1)] * 3, 4, 2, 1 / 40))
    assert [(row["epsilon"], row["delta"]) for row in rows] == [
        (epsilon, 1 / 40) for epsilon in expected
    ]
    assert not caplog.records
    (row,) = run(PRIVATE % "", clients(), network(), rounds=1, delta=1e-5).history
    assert row["delta"] == 1e-5
    assert (
        "epsilon"
        not in run("fedavg(epochs=1, clip=1.0)", clients(), network(), rounds=1).history[0]
    )
    with pytest.raises(InputError, match="delta must be > 0 and < 1"):
        run(PRIVATE % "", clients(), network(), delta=1.0)


def test_an_upload_without_noise_makes_epsilon_infinite_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        methods = (
            "fedavg(epochs=1) | dkd(steps=1, clip=1.0, noise=1.0)",
            "fedavg(epochs=1, clip=1.0, noise=9.0)",
            "fedavg(epochs=1)",
        )
        for method in methods:
            execute(
                [Experiment(method, model="mlp(hidden='8')", clients=4, rounds=1, delta=1e-3)],
                out=tmp_path,
                engine="serial",
            )
    (warning,) = caplog.records
    assert "phase 'local'" in warning.getMessage()
    assert "epsilon is infinite" in warning.getMessage()
    page = Console(width=200, record=True, file=sys.stderr)
    page.print(table(find(tmp_path)))
    text = page.export_text()
    assert "infinite" in text
    assert f"{last([9.0], 4, 4, 1e-3):.2f}" in text
    assert "at delta 0.001" in text


def test_delta_changes_no_number_and_so_not_the_digest() -> None:
    assert Experiment("fedavg()", delta=1e-3).digest == Experiment("fedavg()").digest


def test_a_run_that_goes_on_goes_on_counting() -> None:
    method = parse(PRIVATE % "")
    whole, rest = (list(islice(ledger(method, 9, 3, None, first), 5)) for first in (1, 3))
    assert whole[2:] == rest[:3]


def test_without_the_library_noise_is_refused_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(InputError, match=r"pip install 'feddkd\[privacy\]'"):
        run(PRIVATE % "", clients(), network())
    run("fedavg(epochs=1, clip=1.0)", clients(), network(), rounds=1)
