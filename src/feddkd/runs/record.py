"""The record of a run: a folder with a manifest, a line for each round, and the final tensors.

manifest.json      what was run: experiment, digests of data and partition, protocol, versions,
                   hardware. `engine` is a table (in old records of unfinished runs a text);
                   `made_by` is there if `simulate` made the record
rounds.jsonl       one line for each round, without times: byte by byte the same for two runs on one
                   engine and strategy
timings.jsonl      seconds of each round
partition.json     names of the classes, and how many training examples of each every client has
confusion.json     of the final model: how many test examples of a class (row) were taken for which
                   class (column)
summary.json       the numbers that people quote; there when the run is finished
final.safetensors  the final global tensors
private.safetensors  the tensors that clients keep; `simulate` writes it if there are any
checkpoints/       while the run goes on: where it can be continued (checkpoint.py)
lock               while the run goes on: which process writes here
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from feddkd.errors import InputError

if TYPE_CHECKING:  # to read records takes no torch
    from feddkd.experiment import Experiment

Row = dict[str, Any]


def folder_name(experiment: "Experiment") -> str:
    """Return the name of the folder of an experiment's run."""
    names = "-".join(call.name for call in experiment.parsed_method.calls)
    return f"{names}-seed{experiment.seed}-{experiment.digest[:12]}"


class Counts(NamedTuple):
    """Numbers of examples. The columns are classes, the rows clients or classes."""

    classes: list[str]
    counts: list[list[int]]


@dataclass(frozen=True)
class Record:
    """A run that was read from its folder."""

    folder: Path
    manifest: dict[str, Any]
    history: list[Row]
    timings: list[float]  # seconds of each round

    @property
    def seconds(self) -> float:
        """Seconds of all rounds."""
        return sum(self.timings)

    @cached_property
    def partition(self) -> Counts | None:
        """Examples by client and class; None in records from before it was kept."""
        return _counts(self.folder / "partition.json")

    @cached_property
    def confusion(self) -> Counts | None:
        """Test examples by class and predicted class; None if the run is not finished, or in
        records from before it was kept.
        """
        return _counts(self.folder / "confusion.json")

    @property
    def label(self) -> str:
        """The name of the run in tables."""
        spelled: dict[str, str] = self.manifest["experiment"]
        return spelled.get("name") or spelled["method"]

    @property
    def in_memory(self) -> bool:
        """True if `simulate` made the record, from data in memory."""
        return self.manifest.get("made_by") == "simulate"

    @property
    def experiment(self) -> "Experiment":
        """The experiment; an InputError if the record has none."""
        if self.in_memory:
            raise InputError(
                f"the run in {self.folder} was made by simulate() from data in memory: call"
                " simulate() again with the same arguments"
            )
        from feddkd.experiment import Experiment

        return Experiment(**self.manifest["experiment"])

    @property
    def finished(self) -> bool:
        """True if all rounds have been played."""
        return len(self.history) == int(self.manifest["canonical"]["rounds"])

    @property
    def over(self) -> bool:
        """True if all rounds have been played, or `on_round` ended the run."""
        return self.finished or "stopped" in self.manifest


def finished_summary(folder: Path, digest: str) -> dict[str, Any] | None:
    """Return the summary of the finished run with this digest; None if it is not in the folder."""
    summary = stored_summary(folder)
    if summary is None or summary.get("digest") != digest:
        return None
    return summary if (folder / "final.safetensors").exists() else None


def stored_summary(folder: Path) -> dict[str, Any] | None:
    """Return the content of summary.json; None if there is none."""
    try:
        return dict(json.loads((folder / "summary.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def find(folder: Path, begun: bool = False) -> list[Record]:
    """Return the runs under a folder that have played a round, in the order of their names.

    With `begun`, also runs that have not.
    """
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}")
    records = [read_record(path.parent) for path in sorted(folder.rglob("manifest.json"))]
    chosen = [record for record in records if begun or record.history]
    if not chosen:
        raise InputError(
            f"no runs under {folder}; `feddkd run FILE.toml --out {folder}` makes some"
        )
    return chosen


def read_record(folder: Path) -> Record:
    """Return the record in a folder; raise an InputError if it cannot be read."""
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
        content = json.loads(path.read_text(encoding="utf-8"))
        return Counts(content["classes"], content["counts"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} cannot be read: {error!r}") from None


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file; a crash may have left an incomplete last line."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
