"""A run on disk: a folder with a manifest, one JSON line a round, the timings and the final
tensors.

manifest.json      what was run: experiment, hashes of data and partition, protocol, versions, hardware
rounds.jsonl       one line a round, without times: two runs on one engine and strategy can be compared byte by byte
timings.jsonl      seconds of each round, which do depend on the machine
partition.json     classes by name, and how many training examples of each every client holds
confusion.json     of the final model: how many test examples of a class (row) were taken for which (column)
summary.json       the numbers people quote; there once the run is finished
final.safetensors  the final global tensors
checkpoints/       while it runs: where it can go on from (checkpoint.py)
lock               while it runs: who writes here
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from feddkd.errors import InputError
from feddkd.experiment import Experiment
from feddkd.rounds.loop import Row


def folder_name(experiment: Experiment) -> str:
    names = "-".join(call.name for call in experiment.parsed_method.calls)
    return f"{names}-seed{experiment.seed}-{experiment.digest[:12]}"


class Counts(NamedTuple):
    """Numbers of examples; the columns are classes, the rows clients or classes."""

    classes: list[str]
    counts: list[list[int]]


@dataclass(frozen=True)
class Record:
    """A run as it was found on disk."""

    folder: Path
    manifest: dict[str, Any]
    history: list[Row]
    timings: list[float]  # seconds of each round

    @property
    def seconds(self) -> float:
        return sum(self.timings)

    @cached_property
    def partition(self) -> Counts | None:
        """Clients x classes; None in records from before it was kept."""
        return _counts(self.folder / "partition.json")

    @cached_property
    def confusion(self) -> Counts | None:
        """Classes x classes; None where the run is not finished, or from before it was kept."""
        return _counts(self.folder / "confusion.json")

    @property
    def label(self) -> str:
        """How tables name it."""
        spelled: dict[str, str] = self.manifest["experiment"]
        return spelled.get("name") or spelled["method"]

    @property
    def experiment(self) -> Experiment:
        return Experiment(**self.manifest["experiment"])

    @property
    def finished(self) -> bool:
        return len(self.history) == int(self.manifest["canonical"]["rounds"])


def finished_summary(folder: Path, digest: str) -> dict[str, Any] | None:
    """The summary of a run that has been finished in this folder."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        return (
            dict(summary)
            if summary["digest"] == digest and (folder / "final.safetensors").exists()
            else None
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def find(folder: Path, begun: bool = False) -> list[Record]:
    """All runs with at least one round under a folder, or all that have begun, in the order of
    their names.
    """
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}")
    records = [_read(path.parent) for path in sorted(folder.rglob("manifest.json"))]
    found = [record for record in records if begun or record.history]
    if not found:
        raise InputError(
            f"no runs under {folder}; `feddkd run FILE.toml --out {folder}` makes some"
        )
    return found


def _read(folder: Path) -> Record:
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        history, timings = (_lines(folder / name) for name in ("rounds.jsonl", "timings.jsonl"))
        record = Record(folder, manifest, history, [line["seconds"] for line in timings])
        _ = record.label, record.finished, manifest["family"], manifest["protocol"]["test_accuracy"]
        return record
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"the run in {folder} cannot be read: {error!r}") from None


def _counts(path: Path) -> Counts | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Counts(found["classes"], found["counts"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} cannot be read: {error!r}") from None


def _lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines only: a machine that went away may have left a torn one at the end."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
