"""The writer of a run's folder. `record.py` says what is in it and reads it."""

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

from feddkd.errors import InputError
from feddkd.rounds.loop import Row
from feddkd.runs import checkpoint
from feddkd.runs.lock import Lock
from feddkd.version import __version__

LINES = ("rounds.jsonl", "timings.jsonl")
PRIVATE = "private.safetensors"
# what must not differ when a run is continued
SAME = ("digest", "data", "partition", "constants", "weights")
CIRCUMSTANCES = ("engine", "started", "command", "versions", "hardware")


def circumstances(engine: str, device: torch.device) -> dict[str, Any]:
    """Return the part of a manifest that says how and where a run is carried out."""
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else platform.processor() or "cpu"
    return {
        "engine": {"name": engine},  # `finish` adds what the engine chose
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
            "device": name,
            "threads": torch.get_num_threads(),
        },
    }


@dataclass
class Recorder:
    """Writes the folder of one run while the run goes on. The folder is locked meanwhile."""

    folder: Path
    seconds: float = 0.0  # of all rounds so far, before and after a halt
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
        """Start a new record. It replaces what is in the folder."""
        for name in ("summary.json", "confusion.json", "final.safetensors", PRIVATE):
            (self.folder / name).unlink(missing_ok=True)
        checkpoint.remove(self.folder)
        self._write("manifest.json", manifest)
        self._open("w")

    def go_on(self, manifest: Mapping[str, Any], after: int) -> list[Row]:
        """Continue a record after a round, and return the rows up to there.

        Lines of later rounds, and an incomplete last line, are cut off.
        """
        before = json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))
        for key in SAME:
            old, new = before.get(key), manifest.get(key)
            if old != new:
                raise InputError(
                    f"the run in {self.folder} cannot be continued: its {key} was {old}, now {new}"
                )
        turn = {"after": after, **{key: manifest[key] for key in CIRCUMSTANCES}}
        before.pop("ended", None)
        self._write("manifest.json", {**before, "resumed": [*before.get("resumed", []), turn]})
        rows, timings = (_cut(self.folder / name, after) for name in LINES)
        self.seconds = sum(line["seconds"] for line in timings)
        if len(rows) != after:
            raise InputError(
                f"the run in {self.folder} has a checkpoint of round {after},"
                f" but the rows of {len(rows)} rounds"
            )
        self._open("a")
        return rows

    def _open(self, mode: str) -> None:
        self._files = {name: (self.folder / name).open(mode, encoding="utf-8") for name in LINES}

    def row(self, row: Row, seconds: float) -> None:
        """Write the line of a round, and the seconds it took."""
        self.seconds += seconds
        timing = {"round": row["round"], "seconds": round(seconds, 6)}
        for name, line in zip(LINES, (row, timing), strict=True):
            self._files[name].write(json.dumps(_without_nan(line), allow_nan=False) + "\n")
            self._files[name].flush()

    def keep(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a small JSON file beside the rows."""
        checkpoint.put(self.folder / name, (json.dumps(content) + "\n").encode())

    def sync(self) -> None:
        """Wait until the rows are on disk; a checkpoint relies on them."""
        for file in self._files.values():
            os.fsync(file.fileno())

    def finish(self, summary: Mapping[str, Any], engine: Mapping[str, Any], **facts: Any) -> None:
        """Write the summary, and in the manifest what the engine chose and other late facts."""
        self._extend_manifest({"engine": engine, **facts})
        self._write("summary.json", summary)
        checkpoint.remove(self.folder)
        self.close()

    def tidy(self) -> None:
        """Remove what a run left that was killed between its summary and its end."""
        if self._lock.path.exists() or (self.folder / checkpoint.FOLDER).exists():
            # a process that still writes here, or a read-only folder, changes nothing: the
            # finished run is complete either way
            with suppress(InputError, OSError):
                self._lock.take()
                try:
                    checkpoint.remove(self.folder)
                finally:
                    self._lock.give_back()

    def end(self, why: str) -> None:
        """Record why a run could not go on. Its rows stay."""
        self._extend_manifest({"ended": why})
        self.close()

    def close(self) -> None:
        """Close the files and unlock the folder."""
        for file in self._files.values():
            file.close()
        self._lock.give_back()

    def _extend_manifest(self, facts: Mapping[str, Any]) -> None:
        manifest = json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))
        self._write("manifest.json", {**manifest, **facts})

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        text = json.dumps(_without_nan(content), indent=2) + "\n"
        checkpoint.put(self.folder / name, text.encode())


def _cut(path: Path, after: int) -> list[dict[str, Any]]:
    """Cut a file after the complete lines of rounds up to `after`, and return these."""
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
    """Return a value with null for NaN and infinity, such as the loss of a run that diverged.

    JSON has neither.
    """
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
