"""Evidence of all complete cells of a table: independent figures, directions, and the test's power.

Rounds, communications and local steps to a target are one figure where one is a multiple of the
other, as for every method whose rounds are all alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.special import stdtr

from feddkd.papers.cells import Cell
from feddkd.papers.comparison import Comparison

CHANCE = 0.05


@dataclass(frozen=True)
class Direction:
    """A method's whole cells of one quantity: on which side of the printed means ours lie."""

    table: str
    method: str
    quantity: str
    below: int
    above: int
    difference: float  # ours less printed, mean over the cells
    decimals: int

    @property
    def chance(self) -> float:
        """The probability of as one-sided a result if both sides are as likely (sign test)."""
        n, most = self.below + self.above, max(self.below, self.above)
        row = np.cumprod([1.0, *((n - k) / (k + 1) for k in range(n))])  # binomial coefficients
        return float(min(1.0, 2 * row[most:].sum() / 2**n))


def whole(comparison: Comparison) -> list[Cell]:
    """Return the cells that are printed and whole."""
    return [cell for cell in comparison.cells if cell.printed is not None and cell.complete]


def independent(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells without those that repeat another: its numbers times a constant."""
    kept: list[Cell] = []
    for cell in cells:
        if not any(_repeats(cell, other) for other in kept):
            kept.append(cell)
    return kept


def _repeats(cell: Cell, other: Cell) -> bool:
    same_runs = cell.place[:3] == other.place[:3] and cell.quantity.at == other.quantity.at
    ours, theirs = cell.by_seed, other.by_seed
    if not same_runs or ours.keys() != theirs.keys() or not all(theirs.values()):
        return False
    ratios = [ours[seed] / theirs[seed] for seed in ours]
    return bool(ratios) and max(ratios) - min(ratios) < 1e-9 * max(ratios)


def unlikely(cells: Sequence[Cell]) -> tuple[int, int]:
    """Return how many cells differ from print by more than chance explains, and of how many."""
    chances = [cell.chance for cell in cells if cell.chance is not None]
    return sum(chance < CHANCE for chance in chances), len(chances)


def directions(comparison: Comparison) -> list[Direction]:
    """Return for each method and tested quantity where its cells lie; two cells are the least."""
    found = []
    for method in comparison.table.methods:
        for quantity in comparison.table.tested:
            gaps = [
                cell.difference
                for cell in whole(comparison)
                if cell.place.method == method and cell.place.quantity == quantity
                if cell.difference
            ]
            if len(gaps) > 1:
                below, mean = sum(gap < 0 for gap in gaps), float(np.mean(gaps))
                decimals = max(comparison.table.quantities[quantity].decimals, 1)
                counts = below, len(gaps) - below
                found.append(
                    Direction(comparison.table.name, method, quantity, *counts, mean, decimals)
                )
    return found


@cache
def power(runs: int, shift: float, draws: int = 20_000) -> float:
    """Return how often Welch's test with this many runs on each side finds a shift of the mean, in
    units of the deviation; by simulation. Without a shift it is the test's real size.
    """
    random = np.random.default_rng(0)
    ours = random.normal(size=(draws, runs))
    theirs = random.normal(size=(draws, runs)) + shift
    a, b = (side.var(axis=1, ddof=1) / runs for side in (ours, theirs))
    t = (theirs.mean(axis=1) - ours.mean(axis=1)) / np.sqrt(a + b)
    freedom = (a + b) ** 2 / ((a**2 + b**2) / (runs - 1))
    return float(np.mean(2 * stdtr(freedom, -np.abs(t)) < CHANCE))


@cache
def detectable(runs: int) -> float | None:
    """Return the shift, in deviations, that the test finds four times in five; None above 8."""
    shifts = map(float, np.arange(0.5, 8, 0.1))
    return next((shift for shift in shifts if power(runs, shift) >= 0.8), None)
