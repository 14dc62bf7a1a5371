"""Plays the first rounds of recorded runs again, on the CPU, and compares them with the records.

Cohorts, costs, and the digests of data and division must be the recorded ones. Accuracies may
differ by as much as the precision of the record explains: a rounding is larger after a few rounds.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from feddkd.papers.results import RecordedRun
from feddkd.rounds.loop import Row
from feddkd.runs.prepare import Prepared, prepare
from feddkd.runs.session import job
from feddkd.simulation import Simulation

EXACT = ("round", "clients", "communications", "local_steps", "bytes_up", "bytes_down")
# the largest difference of an accuracy (a share of 1) by the precision of the record
TOLERANCE = {"fp64": 1e-9, "fp32": 0.01, "tf32": 0.05, "bf16": 0.05}


@dataclass(frozen=True)
class Verified:
    """A recorded run beside its first rounds played again."""

    run: RecordedRun
    rounds: int
    differs: tuple[str, ...]  # what should be equal and is not
    difference: float  # the largest of an accuracy

    @property
    def tolerance(self) -> float:
        return TOLERANCE[precision_of(self.run)]

    @property
    def holds(self) -> bool:
        return not self.differs and self.difference <= self.tolerance


def some(runs: Sequence[RecordedRun], count: int, seed: int) -> list[RecordedRun]:
    """Return a random handful of runs; the same seed gives the same."""
    ordered = sorted(runs, key=lambda run: run.experiment.digest)
    return random.Random(seed).sample(ordered, min(count, len(ordered)))


def precision_of(run: RecordedRun) -> str:
    """Return the precision of a record; older ones say it on the command line alone."""
    if "precision" in run.manifest:
        return str(run.manifest["precision"])
    if run.experiment.dtype == "float64":
        return "fp64"
    words = [str(word) for word in run.manifest.get("command", ())]
    if "--precision" in words:
        return words[words.index("--precision") + 1]
    on_cpu = "NVIDIA" not in str(run.manifest.get("hardware", {}).get("device"))
    return "fp32" if on_cpu else "tf32"


def verify(run: RecordedRun, rounds: int, folder: Path | None, engine: str = "auto") -> Verified:
    """Play the first rounds of a run again and compare each with its record."""
    experiment = replace(run.experiment, diagnostics=False)
    ready, recorded = prepare(experiment, folder), run.rounds[:rounds]
    with Simulation(job([experiment], [ready]), engine) as simulation:
        played = [found[0] for found, _ in zip(simulation.rounds(), recorded, strict=False)]
    pairs = list(zip(played, recorded, strict=True))
    differs = _digests(run, ready) + [
        f"{key} of round {old['round']}"
        for new, old in pairs
        for key in EXACT
        if new[key] != old[key]
    ]
    difference = max(_difference(new, old) for new, old in pairs)
    return Verified(run, len(pairs), tuple(differs), difference)


def _digests(run: RecordedRun, ready: Prepared) -> list[str]:
    found = {"data": ready.data.digest, "partition": ready.split.digest}
    return [key for key, digest in found.items() if run.manifest[key]["digest"] != digest]


def _difference(new: Row, old: Row) -> float:
    """Return the largest difference of an accuracy that both rows have."""
    keys = [
        key
        for key in new.keys() & old.keys()
        if key.endswith(("test_accuracy", "validation_accuracy"))
    ]
    return max(float(abs(new[key] - old[key])) for key in keys)
