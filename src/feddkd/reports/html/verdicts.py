"""Verdicts: the best method, its lead, and whether the lead is significant.

There is one verdict for each task, since only runs of one task can be compared.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from feddkd.reports.curves import band, gain
from feddkd.reports.families import families, headline_of, labels, target_of
from feddkd.reports.statistics import paired
from feddkd.reports.tables import paired_cells
from feddkd.rounds.metrics import Metric
from feddkd.runs.record import Record
from feddkd.runs.summary import best_row, cost_of, mean_and_std, summarise

LEVEL = 0.05  # p values below it are called significant
METHOD_KEYS = ("method", "seed", "split_seed")  # they may differ within a task


@dataclass(frozen=True)
class Standing:
    """A method in a task: its records, and by seed the headline metric of the column "best", in the
    unit that is shown.
    """

    label: str
    group: list[Record]
    metric: Metric
    by_seed: Mapping[int, float]

    @property
    def mean(self) -> float:
        """The mean over seeds; NaN if no seed has a value."""
        return fmean(self.by_seed.values()) if self.by_seed else math.nan

    @property
    def shown(self) -> str:
        """Mean and deviation as text."""
        digits, unit = self.metric.digits, self.metric.unit
        if len(self.by_seed) < 2:
            return f"{self.mean:.{digits}f}{unit}"
        mean, deviation = mean_and_std(list(self.by_seed.values()))
        return f"{mean:.{digits}f} ± {deviation:.{digits}f}{unit}"


@dataclass(frozen=True)
class Verdict:
    """The texts about a task: a sentence, some figures, and the best method against each other."""

    task: str
    lead: Standing
    sentence: str
    certainty: str
    tiles: list[tuple[str, str]]  # a figure and its meaning
    against: list[list[str]]


def ranked(records: Sequence[Record]) -> list[Record]:
    """Return the same records, the best method first."""
    metric = headline_of(records)

    def rank(group: Sequence[Record]) -> float:
        return metric.rank(_standing("", list(group), metric).mean)

    groups = sorted(families(records), key=rank, reverse=True)
    return [record for group in groups for record in group]


def verdicts(records: Sequence[Record]) -> list[Verdict]:
    """Return a verdict for each task."""
    metric, groups = headline_of(records), families(records)
    tasks: dict[tuple[str, ...], list[Standing]] = {}
    for label, group in zip(labels(groups), groups, strict=True):
        tasks.setdefault(_task(group[0]), []).append(_standing(label, group, metric))
    titles = _titles(list(tasks))
    return [
        _verdict(title, standings) for title, standings in zip(titles, tasks.values(), strict=True)
    ]


def _verdict(task: str, standings: list[Standing]) -> Verdict:
    rank = standings[0].metric.rank
    lead, *others = sorted(standings, key=lambda one: rank(one.mean), reverse=True)
    sentence, certainty = f"reaches {lead.shown}", ""
    if others:
        sentence += f", {_ahead(lead, others[0])}"
        certainty = _certainty(lead, others[0])
    against = []
    for other in others:
        test = paired(lead.by_seed, other.by_seed)
        if test is not None:
            against.append([other.label, *paired_cells(test, lead.metric.digits)])
    return Verdict(task, lead, sentence, certainty, _tiles(lead, others[:1]), against)


def _ahead(lead: Standing, second: Standing) -> str:
    """Return the lead over the second method as text."""
    gap, metric = abs(lead.mean - second.mean), lead.metric
    if gap == 0:
        return f"level with {second.label}"
    return f"{gap:.{metric.digits}f}{metric.difference_unit} ahead of {second.label}, the next best"


def _certainty(lead: Standing, second: Standing) -> str:
    """Return a sentence that says whether the lead is significant."""
    test = paired(lead.by_seed, second.by_seed)
    if test is None or test.t_p is None:
        seeds = 0 if test is None else test.difference.n
        return (
            f"Too few seeds in common to tell whether that is chance: {seeds}, and a paired test"
            " needs 3 that differ."
        )
    verdict = "significant" if test.t_p < LEVEL else "not significant"
    rank, word = lead.metric.rank, "Higher" if lead.metric.higher_is_better else "Lower"
    common = lead.by_seed.keys() & second.by_seed.keys()
    wins = sum(rank(lead.by_seed[seed]) > rank(second.by_seed[seed]) for seed in common)
    return (
        f"{word} in {wins} of {test.difference.n} seeds; p = {test.t_p:.2g} in a paired t-test:"
        f" {verdict} at {100 * LEVEL:g} %."
    )


def _tiles(lead: Standing, second: Sequence[Standing]) -> list[tuple[str, str]]:
    """Return the figures of the best method, each with its meaning."""
    metric, selection = lead.metric, summarise(lead.group[0].history)["selection"]
    tiles = [(lead.shown, f"test {metric.title}, {selection}")]
    for other in second:
        test = paired(lead.by_seed, other.by_seed)
        gap = f"{lead.mean - other.mean:+.{metric.digits}f}"
        tiles.append((gap, f"{metric.difference_unit} against {other.label}".strip()))
        if test is not None and test.t_p is not None:
            tiles.append((f"p = {test.t_p:.2g}", f"paired t-test, {test.difference.n} seeds"))
    return [*tiles, *_target_tile(lead), *_gain_tile(lead)]


def _target_tile(lead: Standing) -> list[tuple[str, str]]:
    target = target_of(lead.group)
    if target is None:
        return []
    reached = [cost_of(record.history, target) for record in lead.group]
    rounds = [one["round"] for one in reached if one is not None]
    if not rounds:
        return []
    goal = f"rounds to {target.text}, {len(rounds)} of {len(lead.group)} seeds"
    return [(f"{fmean(rounds):.3g}", goal)]


def _gain_tile(lead: Standing) -> list[tuple[str, str]]:
    metric = lead.metric
    gained = band(lead.group, gain(metric))
    if gained is None:
        return []
    title = f"{metric.difference_unit} of DKD on the plain average, mean over rounds".strip()
    return [(f"{np.nanmean(gained.mean):+.{metric.digits}f}", title)]


def _task(record: Record) -> tuple[str, ...]:
    """Return the keys that must be equal in runs that are compared."""
    canonical = record.manifest["canonical"].items()
    return tuple(f"{key} {value}" for key, value in canonical if key not in METHOD_KEYS)


def _titles(tasks: list[tuple[str, ...]]) -> list[str]:
    """Return for each task the keys in which tasks differ; an empty text if there is only one."""
    common = set.intersection(*map(set, tasks))
    return [", ".join(part for part in task if part not in common) for task in tasks]


def _standing(label: str, group: list[Record], metric: Metric) -> Standing:
    by_seed = {}
    for record in group:
        value = best_row(record.history).get(metric.test_key)
        if value is not None:
            by_seed[record.manifest["canonical"]["seed"]] = metric.scale * value
    return Standing(label, group, metric, by_seed)
