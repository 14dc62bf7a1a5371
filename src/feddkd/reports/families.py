"""Groups records into families, runs that differ in their seeds alone, and names them."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from feddkd.rounds.metrics import Metric, Target, headline, read_target
from feddkd.runs.record import Counts, Record

Family = Sequence[Record]  # runs that differ in their seeds alone


def target_of(records: Sequence[Record]) -> Target | None:
    """Return the target of the first record that has one."""
    for record in records:
        if "target" in record.manifest["experiment"]:
            return read_target(record.manifest["experiment"]["target"], headline(record.history))
    return None


def headline_of(records: Sequence[Record]) -> Metric:
    """Return the headline metric of the first record."""
    return headline(records[0].history)


def families(records: Sequence[Record]) -> list[list[Record]]:
    """Group the records that differ in their seeds alone."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.manifest["family"], []).append(record)
    return list(groups.values())


def labels(groups: list[list[Record]]) -> list[str]:
    """Return a name for each family: the user's, or that of its methods without options; a longer
    one where two would be the same.
    """
    whole = [group[0].label for group in groups]
    short = [_short_name(group[0]) for group in groups]
    more = _differences([group[0].manifest for group in groups])
    schemes = (
        short,
        [name + rest for name, rest in zip(short, more, strict=True)],
        whole,
        [name + rest for name, rest in zip(whole, more, strict=True)],
    )
    chosen = []
    for number, default in enumerate(whole):
        unique = [names[number] for names in schemes if names.count(names[number]) == 1]
        chosen.append(unique[0] if unique else default)
    return chosen


def _short_name(record: Record) -> str:
    return record.manifest["experiment"].get("name") or method_names(record)


def _differences(manifests: Sequence[dict[str, Any]]) -> list[str]:
    """Return for each manifest a text with the keys that are not the same in all of them."""
    every = dict.fromkeys(key for manifest in manifests for key in manifest["canonical"])
    keys = [key for key in every if key not in ("method", "seed", "split_seed")]
    unlike = [key for key in keys if len({m["canonical"].get(key) for m in manifests}) > 1]
    texts = []
    for manifest in manifests:
        spelled, canonical = manifest["experiment"], manifest["canonical"]
        parts = [f", {key} {spelled.get(key, canonical.get(key))}" for key in unlike]
        texts.append("".join(parts))
    return texts


def method_names(record: Record) -> str:
    """Return the text of the method without its options."""
    return re.sub(r"\([^()]*\)", "", record.manifest["experiment"]["method"])


def confused(group: Family) -> Counts | None:
    """Return the sum of the confusion matrices of a family; None if no record has one."""
    known = [record.confusion for record in group if record.confusion is not None]
    if not known:
        return None
    total = np.sum([matrix.counts for matrix in known], axis=0)
    return Counts(known[0].classes, total.tolist())
