"""Who won, by how much, and is it significant:

one verdict for each task, since only runs of one task can be compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from feddkd.reports.curves import band, gain
from feddkd.reports.statistics import Paired, paired
from feddkd.reports.tables import families, labels, paired_cells, target_of
from feddkd.runs.record import Record
from feddkd.runs.summary import mean_and_std, summarise, to_target

LEVEL = 0.05  # below this chance a difference is called significant
OF_A_METHOD = ("method", "seed", "split_seed")  # what may differ within a task


@dataclass(frozen=True)
class Standing:
    """A method in a task: its records, and by seed the test accuracy in %, of the table's column
    "best".
    """

    label: str
    group: list[Record]
    by_seed: Mapping[int, float]

    @property
    def mean(self) -> float:
        return fmean(self.by_seed.values())

    @property
    def shown(self) -> str:
        mean, deviation = mean_and_std(list(self.by_seed.values()))
        return f"{mean:.2f} ± {deviation:.2f} %" if len(self.by_seed) > 1 else f"{mean:.2f} %"


@dataclass(frozen=True)
class Verdict:
    """What to say of a task: in a sentence, in some figures, and the leading method against each
    other one.
    """

    task: str
    lead: Standing
    sentence: str
    certainty: str
    tiles: list[tuple[str, str]]  # a figure and what it is
    against: list[list[str]]


def ranked(records: Sequence[Record]) -> list[Record]:
    """The same records, the most accurate method first."""
    return [
        record for group in sorted(families(records), key=_mean, reverse=True) for record in group
    ]


def verdicts(records: Sequence[Record]) -> list[Verdict]:
    groups = families(records)
    tasks: dict[tuple[str, ...], list[Standing]] = {}
    for label, group in zip(labels(groups), groups, strict=True):
        tasks.setdefault(_task(group[0]), []).append(Standing(label, group, _by_seed(group)))
    titles = _titles(list(tasks))
    return [
        _verdict(title, standings) for title, standings in zip(titles, tasks.values(), strict=True)
    ]


def _verdict(task: str, standings: list[Standing]) -> Verdict:
    lead, *others = sorted(standings, key=lambda one: one.mean, reverse=True)
    tests = [(other, paired(lead.by_seed, other.by_seed)) for other in others]
    first = tests[0] if tests else None
    sentence = f"reaches {lead.shown}" + (f", {_ahead(lead, first[0])}" if first else "")
    against = [[other.label, *paired_cells(test)] for other, test in tests if test is not None]
    return Verdict(
        task, lead, sentence, _certainty(first[1]) if first else "", _tiles(lead, first), against
    )


def _ahead(lead: Standing, second: Standing) -> str:
    gap = lead.mean - second.mean
    return (
        f"level with {second.label}"
        if gap == 0
        else f"{gap:.2f} points ahead of {second.label}, the next best"
    )


def _certainty(test: Paired | None) -> str:
    if test is None or test.t_p is None:
        seeds = 0 if test is None else test.difference.n
        return (
            f"Too few seeds in common to tell whether that is chance: {seeds}, and a paired test"
            " needs 3 that differ."
        )
    verdict = "significant" if test.t_p < LEVEL else "not significant"
    higher = f"Higher in {test.wins} of {test.difference.n} seeds"
    return f"{higher}; p = {test.t_p:.2g} in a paired t-test: {verdict} at {100 * LEVEL:g} %."


def _tiles(lead: Standing, first: tuple[Standing, Paired | None] | None) -> list[tuple[str, str]]:
    tiles = [(lead.shown, f"test accuracy, {summarise(lead.group[0].history)['selection']}")]
    if first is not None:
        tiles.append((f"{lead.mean - first[0].mean:+.2f}", f"points on {first[0].label}"))
        if first[1] is not None and first[1].t_p is not None:
            tiles.append(
                (f"p = {first[1].t_p:.2g}", f"paired t-test, {first[1].difference.n} seeds")
            )
    target = target_of(lead.group)
    reached = (
        []
        if target is None
        else [cost["round"] for r in lead.group if (cost := to_target(r.history, target))]
    )
    if reached and target is not None:
        tiles.append(
            (
                f"{fmean(reached):.3g}",
                f"rounds to {100 * target:g} %, {len(reached)} of {len(lead.group)} seeds",
            )
        )
    if (gained := band(lead.group, gain)) is not None:
        tiles.append(
            (
                f"{np.nanmean(gained.mean):+.2f}",
                "points of DKD on the plain average, mean over rounds",
            )
        )
    return tiles


def _task(record: Record) -> tuple[str, ...]:
    return tuple(
        f"{key} {value}"
        for key, value in record.manifest["canonical"].items()
        if key not in OF_A_METHOD
    )


def _titles(tasks: list[tuple[str, ...]]) -> list[str]:
    """By what tells them apart; nothing where there is one."""
    common = set.intersection(*map(set, tasks))
    return [", ".join(part for part in task if part not in common) for task in tasks]


def _by_seed(group: Sequence[Record]) -> dict[int, float]:
    return {
        record.manifest["canonical"]["seed"]: 100 * summarise(record.history)["test_accuracy"]
        for record in group
    }


def _mean(group: Sequence[Record]) -> float:
    return fmean(_by_seed(group).values())
