"""The uncertainty of a mean and of a difference: between two methods that ran with the same seeds,
or from a printed number.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

ENOUGH = 6  # the least number of pairs for which Wilcoxon's test can fall below 5 %


@dataclass(frozen=True)
class Spread:
    """Statistics of one number for each seed; None where there are too few seeds."""

    n: int
    mean: float
    median: float
    population_std: float
    sample_std: float | None
    low: float | None  # of the 95 % confidence interval of the mean, by Student's t
    high: float | None


@dataclass(frozen=True)
class Paired:
    """One method against another, seed by seed: the difference and its probability by chance."""

    difference: Spread
    wins: int  # seeds in which the first is the higher
    t_p: float | None
    wilcoxon_p: float | None


def spread(values: Sequence[float]) -> Spread:
    """Return statistics of some numbers."""
    mean, median = statistics.fmean(values), statistics.median(values)
    population = statistics.pstdev(values)
    if len(values) < 2:
        return Spread(len(values), mean, median, population, None, None, None)
    from scipy.special import stdtrit  # scipy.stats takes half a second to import

    std = statistics.stdev(values)
    reach = float(stdtrit(len(values) - 1, 0.975)) * std / math.sqrt(len(values))
    return Spread(len(values), mean, median, population, std, mean - reach, mean + reach)


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Paired | None:
    """Return the paired test of ours less theirs over common seeds; None if there are none."""
    differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    if not differences:
        return None
    wins = sum(difference > 0 for difference in differences)
    return Paired(spread(differences), wins, _t_test(differences), _wilcoxon(differences))


def holm(chances: Sequence[float]) -> list[float]:
    """Return p values corrected for their number by Holm's method, in the given order."""
    order = sorted(range(len(chances)), key=lambda at: chances[at])
    corrected, least = [0.0] * len(chances), 0.0
    for place, at in enumerate(order):
        least = max(least, min(1.0, (len(chances) - place) * chances[at]))
        corrected[at] = least
    return corrected


def effect_size(differences: Sequence[float]) -> tuple[float, float, float] | None:
    """Return Cohen's d of paired differences, mean by deviation, and its 95 % interval; None if
    there are fewer than three, or if all are equal.
    """
    n = len(differences)
    if n < 3 or statistics.stdev(differences) == 0:
        return None
    from scipy.special import nctdtrinc

    d, root = statistics.fmean(differences) / statistics.stdev(differences), math.sqrt(n)
    low, high = (float(nctdtrinc(n - 1, share, d * root)) / root for share in (0.975, 0.025))
    return d, low, high


def apart(ours: Sequence[float], mean: float, population_std: float, n: int) -> float | None:
    """Return the p value of Welch's t-test between our numbers and n others, of which only mean and
    deviation are known; None if there are too few, or if no numbers differ.
    """
    if min(len(ours), n) < 2 or (population_std == 0 and statistics.stdev(ours) == 0):
        return None
    from scipy.stats import ttest_ind_from_stats

    ours_in_short = statistics.fmean(ours), statistics.stdev(ours), len(ours)
    others = mean, population_std * math.sqrt(n / (n - 1)), n
    return float(ttest_ind_from_stats(*ours_in_short, *others, equal_var=False).pvalue)


def _t_test(differences: Sequence[float]) -> float | None:
    if len(differences) < 3 or statistics.stdev(differences) == 0:
        return None
    from scipy.special import stdtr

    # to the last bit scipy.stats.ttest_1samp, which takes half a second to import
    values, n = np.asarray(differences), len(differences)
    mean = np.mean(values)
    variance = np.mean((values - mean) ** 2) * (n / (n - 1))
    return float(2 * stdtr(n - 1, -abs(mean / np.sqrt(variance / n))))


def _wilcoxon(differences: Sequence[float]) -> float | None:
    if len(differences) < ENOUGH or not any(differences):
        return None
    from scipy.stats import wilcoxon

    return float(wilcoxon(differences).pvalue)
