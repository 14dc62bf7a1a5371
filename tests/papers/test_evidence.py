"""Evidence of several cells: figures counted once, directions, and the power of the test."""

import math
from dataclasses import replace

import pytest
from scipy.stats import binomtest, nct, t

from feddkd.papers.cells import Cell, RunValues
from feddkd.papers.definitions import Printed, PrintedCell, Quantity
from feddkd.papers.evidence import Direction, independent, power


def cell(quantity: str, values: list[float], at: str = "target") -> Cell:
    return Cell(
        PrintedCell("table", "FedDKD", "c=0.5", quantity),
        Quantity(at, quantity),
        Printed("10", "1", runs=len(values)),
        [RunValues(seed, [value], 9, settled=True) for seed, value in enumerate(values)],
        len(values),
        9 * len(values),
    )


def test_a_figure_that_is_a_multiple_of_another_counts_once() -> None:
    rounds, comms = cell("round", [5, 7, 9]), cell("communications", [55, 77, 99])
    other = cell("steps", [5, 7, 9.5])
    assert independent([rounds, comms, other]) == [rounds, other]
    elsewhere = replace(comms, place=comms.place._replace(setting="c=0.25"))
    assert independent([rounds, elsewhere]) == [rounds, elsewhere]
    best = replace(comms, quantity=replace(comms.quantity, at="best_validation"))
    assert independent([rounds, best]) == [rounds, best]


@pytest.mark.parametrize(("below", "above"), [(6, 0), (5, 1), (4, 2), (1, 9), (3, 3)])
def test_the_sign_test_is_scipys(below: int, above: int) -> None:
    found = Direction("table", "FedDKD", "accuracy", below, above, -0.1, 2).chance
    assert found == pytest.approx(binomtest(below, below + above).pvalue)


def test_the_power_with_many_runs_is_students() -> None:
    """Welch's and Student's tests agree where both sides have many runs and one deviation."""
    runs, shift, df = 30, 0.8, 58
    limit, noncentral = t.ppf(0.975, df), shift * math.sqrt(runs / 2)
    exact = 1 - nct.cdf(limit, df, noncentral) + nct.cdf(-limit, df, noncentral)
    assert power(runs, shift) == pytest.approx(exact, abs=0.01)
    assert power(runs, 0.0) == pytest.approx(0.05, abs=0.006)
    assert power(3, 0.0) < 0.04  # of three runs the test is too careful
