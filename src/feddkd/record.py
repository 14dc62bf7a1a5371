"""A run on disk: a folder with a manifest, one JSON line a round, the timings and the final tensors.

manifest.json      what was run: experiment, hashes of data and partition, protocol, versions, hardware
rounds.jsonl       one line a round, without times: two runs on one engine and strategy can be compared byte by byte
timings.jsonl      seconds of each round, which do depend on the machine
summary.json       the numbers people quote; there once the run is finished
final.safetensors  the final global tensors
"""

import json
import math
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import numpy
import torch

from feddkd.errors import InputError
from feddkd.experiment import Experiment
from feddkd.rounds import Row
from feddkd.version import __version__


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
    """Writes one run's folder as the run goes on."""

    folder: Path
    _files: dict[str, TextIO] = field(default_factory=dict)

    def open(self, manifest: Mapping[str, Any]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "summary.json").unlink(missing_ok=True)  # whatever was there is being written anew
            self._write("manifest.json", manifest)
            self._files = {name: (self.folder / name).open("w", encoding="utf-8") for name in ("rounds.jsonl", "timings.jsonl")}
        except OSError as error:
            raise InputError(f"cannot write the run to {self.folder}: {error.strerror}") from None

    def row(self, row: Row, seconds: float) -> None:
        for name, line in (("rounds.jsonl", row), ("timings.jsonl", {"round": row["round"], "seconds": round(seconds, 6)})):
            self._files[name].write(json.dumps(_without_nan(line), allow_nan=False) + "\n")
            self._files[name].flush()

    def finish(self, summary: Mapping[str, Any], engine: Mapping[str, Any]) -> None:
        """The summary, and in the manifest what the engine decided along the way."""
        manifest = json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))
        self._write("manifest.json", {**manifest, "engine": engine})
        self._write("summary.json", summary)
        self.close()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        (self.folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _without_nan(line: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN or infinity, and the loss of a run that diverged is one of them: null."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in line.items()}


@dataclass(frozen=True)
class Record:
    """A run as it was found on disk."""

    folder: Path
    manifest: dict[str, Any]
    history: list[Row]
    seconds: float

    @property
    def label(self) -> str:
        """How tables name it."""
        spelled: dict[str, str] = self.manifest["experiment"]
        return spelled.get("name") or spelled["method"]

    @property
    def finished(self) -> bool:
        return len(self.history) == int(self.manifest["canonical"]["rounds"])


def find(folder: Path) -> list[Record]:
    """All runs with at least one round under a folder, oldest name first."""
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}")
    records = [_read(path.parent) for path in sorted(folder.rglob("manifest.json"))]
    found = [record for record in records if record.history]
    if not found:
        raise InputError(f"no runs under {folder}; `feddkd run FILE.toml --out {folder}` makes some")
    return found


def _read(folder: Path) -> Record:
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        history, timings = (_lines(folder / name) for name in ("rounds.jsonl", "timings.jsonl"))
        record = Record(folder, manifest, history, sum(line["seconds"] for line in timings))
        _ = record.label, record.finished, manifest["family"], manifest["protocol"]["test_accuracy"]
        return record
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"the run in {folder} cannot be read: {error!r}") from None


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
