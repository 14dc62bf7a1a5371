"""A run on disk: a folder with a manifest, one JSON line a round, the timings and the final tensors.

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
import math
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy
import torch

from feddkd import checkpoint
from feddkd.errors import InputError
from feddkd.experiment import Experiment
from feddkd.lock import Lock
from feddkd.rounds import Row
from feddkd.version import __version__

LINES = ("rounds.jsonl", "timings.jsonl")


def folder_name(experiment: Experiment) -> str:
    names = "-".join(call.name for call in experiment.parsed_method.calls)
    return f"{names}-seed{experiment.seed}-{experiment.digest[:12]}"


def describe(experiment: Experiment, *, engine: str, device: torch.device, **facts: Any) -> dict[str, Any]:
    """The manifest: enough to verify a result, or to refuse it as not comparable."""
    return {
        "experiment": experiment.as_dict(),
        "canonical": experiment.canonical,
        "digest": experiment.digest,
        "family": experiment.family,
        "protocol": {"test_accuracy": experiment.protocol.value, "average_test_accuracy": "the same, before DKD (plain average)"},
        **facts,
        "engine": engine,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "versions": {
            "feddkd": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": numpy.__version__,
        },
        "hardware": {
            "machine": platform.machine(),
            "system": platform.platform(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
            "threads": torch.get_num_threads(),
        },
    }


@dataclass
class Recorder:
    """Writes one run's folder as the run goes on. Nobody else may write there meanwhile."""

    folder: Path
    seconds: float = 0.0  # that its rounds have taken, before a halt and after it
    _files: dict[str, IO[str]] = field(default_factory=dict)
    _lock: Lock = field(init=False)

    def __post_init__(self) -> None:
        self._lock = Lock(self.folder)

    def take(self) -> None:
        """Make the folder and lock it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.take()
        except OSError as error:
            raise InputError(f"cannot write the run to {self.folder}: {error.strerror}") from None

    def begin(self, manifest: Mapping[str, Any]) -> None:
        """Anew: whatever was there is written over."""
        for name in ("summary.json", "confusion.json", "final.safetensors"):
            (self.folder / name).unlink(missing_ok=True)
        checkpoint.remove(self.folder)
        self._write("manifest.json", manifest)
        self._open("w")

    def go_on(self, manifest: Mapping[str, Any], after: int) -> list[Row]:
        """Go on after a round: lines of later rounds, and a torn one, are cut off. Returns the rows that stand."""
        before = json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))
        for key in ("digest", "data", "partition"):
            if before[key] != manifest[key]:
                raise InputError(
                    f"the run in {self.folder} cannot go on: its {key} was {before[key]}, and now is {manifest[key]}"
                )
        turn = {"after": after, **{key: manifest[key] for key in ("engine", "started", "command", "versions", "hardware")}}
        before.pop("ended", None)
        self._write("manifest.json", {**before, "resumed": [*before.get("resumed", []), turn]})
        rows, timings = (_cut(self.folder / name, after) for name in LINES)
        self.seconds = sum(line["seconds"] for line in timings)
        if len(rows) != after:
            raise InputError(f"the run in {self.folder} has a checkpoint of round {after}, but the lines of {len(rows)} rounds")
        self._open("a")
        return rows

    def _open(self, mode: str) -> None:
        self._files = {name: (self.folder / name).open(mode, encoding="utf-8") for name in LINES}

    def row(self, row: Row, seconds: float) -> None:
        self.seconds += seconds
        for name, line in zip(LINES, (row, {"round": row["round"], "seconds": round(seconds, 6)}), strict=True):
            self._files[name].write(json.dumps(_without_nan(line), allow_nan=False) + "\n")
            self._files[name].flush()

    def keep(self, name: str, content: Mapping[str, Any]) -> None:
        """A small file beside the lines, compact."""
        checkpoint.put(self.folder / name, (json.dumps(content) + "\n").encode())

    def sync(self) -> None:
        """Lines on disk before a checkpoint counts on them."""
        for file in self._files.values():
            os.fsync(file.fileno())

    def finish(self, summary: Mapping[str, Any], engine: Mapping[str, Any]) -> None:
        """The summary, and in the manifest what the engine decided along the way."""
        manifest = json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))
        self._write("manifest.json", {**manifest, "engine": engine})
        self._write("summary.json", summary)
        checkpoint.remove(self.folder)
        self.close()

    def end(self, why: str) -> None:
        """A run that could not go on: its rows stay, and the manifest tells."""
        manifest = json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))
        self._write("manifest.json", {**manifest, "ended": why})
        self.close()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._lock.give_back()

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        checkpoint.put(self.folder / name, (json.dumps(_without_nan(content), indent=2) + "\n").encode())


def _cut(path: Path, after: int) -> list[dict[str, Any]]:
    """Leave the whole lines of rounds up to `after` in a file, and return them."""
    kept: list[dict[str, Any]] = []
    end = 0
    with path.open("rb+") as file:
        for line in file:
            if len(kept) == after or not line.endswith(b"\n"):
                break
            kept.append(json.loads(line))
            end += len(line)
        file.truncate(end)
    return kept


def _without_nan(value: Any) -> Any:
    """JSON has no NaN or infinity, and the loss of a run that diverged is one of them: null."""
    if isinstance(value, dict):
        return {key: _without_nan(own) for key, own in value.items()}
    if isinstance(value, list):
        return [_without_nan(own) for own in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
        return dict(summary) if summary["digest"] == digest and (folder / "final.safetensors").exists() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def find(folder: Path, begun: bool = False) -> list[Record]:
    """All runs with at least one round under a folder, or all that have begun, in the order of their names."""
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}")
    records = [_read(path.parent) for path in sorted(folder.rglob("manifest.json"))]
    found = [record for record in records if begun or record.history]
    if not found:
        raise InputError(f"no runs under {folder}; `feddkd run FILE.toml --out {folder}` makes some")
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
