"""How sure a mean is, and a difference:

between two methods that ran with the same seeds, or to a printed number.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

ENOUGH = 6  # pairs from which on Wilcoxon's test can fall below 5 % at all


@dataclass(frozen=True)
class Spread:
    """Numbers of several seeds in short. What too few of them do not tell is None."""

    n: int
    mean: float
    median: float
    population_std: float
    sample_std: float | None
    low: float | None  # of the 95 % confidence interval of the mean, by Student's t
    high: float | None


@dataclass(frozen=True)
class Paired:
    """One method against another, seed by seed: the difference and how likely it is by chance."""

    difference: Spread
    wins: int  # seeds in which the first is the higher
    t_p: float | None
    wilcoxon_p: float | None


def spread(values: Sequence[float]) -> Spread:
    mean, median, population = (
        statistics.fmean(values),
        statistics.median(values),
        statistics.pstdev(values),
    )
    if len(values) < 2:
        return Spread(len(values), mean, median, population, None, None, None)
    from scipy.special import stdtrit  # scipy.stats takes half a second to import

    std = statistics.stdev(values)
    reach = float(stdtrit(len(values) - 1, 0.975)) * std / math.sqrt(len(values))
    return Spread(len(values), mean, median, population, std, mean - reach, mean + reach)


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Paired | None:
    """The seeds that both have; None without any."""
    differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    if not differences:
        return None
    return Paired(
        spread(differences),
        sum(one > 0 for one in differences),
        _t_test(differences),
        _wilcoxon(differences),
    )


def apart(ours: Sequence[float], mean: float, population_std: float, n: int) -> float | None:
    """How likely our numbers and n others, known by their mean and deviation alone, would lie so
    far apart if both came from one place: Welch's t-test. None where there are too few, or none of
    them differ.
    """
    if min(len(ours), n) < 2 or (population_std == 0 and statistics.stdev(ours) == 0):
        return None
    from scipy.stats import ttest_ind_from_stats

    others = mean, population_std * math.sqrt(n / (n - 1)), n
    return float(
        ttest_ind_from_stats(
            statistics.fmean(ours), statistics.stdev(ours), len(ours), *others, equal_var=False
        ).pvalue
    )


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
