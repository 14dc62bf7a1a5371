"""Writes a run's folder, as `record.py` describes and reads it."""

import json
import math
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import numpy
import torch

from feddkd.runs import checkpoint
from feddkd.errors import InputError
from feddkd.experiment import Experiment
from feddkd.runs.lock import Lock
from feddkd.rounds.loop import Row
from feddkd.version import __version__

LINES = ("rounds.jsonl", "timings.jsonl")


def describe(
    experiment: Experiment, *, engine: str, device: torch.device, **facts: Any
) -> dict[str, Any]:
    """The manifest: enough to verify a result, or to refuse it as not comparable."""
    return {
        "experiment": experiment.as_dict(),
        "canonical": experiment.canonical,
        "digest": experiment.digest,
        "family": experiment.family,
        "protocol": {
            "test_accuracy": experiment.protocol.value,
            "average_test_accuracy": "the same, before DKD (plain average)",
        },
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
            "device": torch.cuda.get_device_name(device)
            if device.type == "cuda"
            else platform.processor() or "cpu",
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
        """Go on after a round: lines of later rounds, and a torn one, are cut off. Returns the rows
        that stand.
        """
        before = json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))
        for key in ("digest", "data", "partition", "constants"):
            if before.get(key) != manifest.get(key):
                raise InputError(
                    f"the run in {self.folder} cannot go on: its {key} was {before.get(key)}, and now is {manifest.get(key)}"
                )
        turn = {
            "after": after,
            **{
                key: manifest[key]
                for key in ("engine", "started", "command", "versions", "hardware")
            },
        }
        before.pop("ended", None)
        self._write("manifest.json", {**before, "resumed": [*before.get("resumed", []), turn]})
        rows, timings = (_cut(self.folder / name, after) for name in LINES)
        self.seconds = sum(line["seconds"] for line in timings)
        if len(rows) != after:
            raise InputError(
                f"the run in {self.folder} has a checkpoint of round {after}, but the lines of {len(rows)} rounds"
            )
        self._open("a")
        return rows

    def _open(self, mode: str) -> None:
        self._files = {name: (self.folder / name).open(mode, encoding="utf-8") for name in LINES}

    def row(self, row: Row, seconds: float) -> None:
        self.seconds += seconds
        for name, line in zip(
            LINES, (row, {"round": row["round"], "seconds": round(seconds, 6)}), strict=True
        ):
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

    def tidy(self) -> None:
        """Removes what a run left that was killed between its summary and its end."""
        if self._lock.path.exists() or (self.folder / checkpoint.FOLDER).exists():
            # its own writer is at it, or nobody may: a finished run is whole either way
            with suppress(InputError, OSError):
                self._lock.take()
                try:
                    checkpoint.remove(self.folder)
                finally:
                    self._lock.give_back()

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
        checkpoint.put(
            self.folder / name, (json.dumps(_without_nan(content), indent=2) + "\n").encode()
        )


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
