"""The writer of a run's folder. `record.py` says what is in it and reads it."""

import json
import logging
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from feddkd.errors import InputError
from feddkd.rounds.loop import Row
from feddkd.runs import checkpoint
from feddkd.runs.circumstances import CIRCUMSTANCES, differences
from feddkd.runs.damage import WEIGHTS, complete_lines
from feddkd.runs.files import Appended, parsed, put
from feddkd.runs.lock import Lock
from feddkd.runs.seal import LINES, SealWriter

PRIVATE = "private.safetensors"
# what must not differ when a run is continued
SAME = ("digest", "data", "partition", "constants", "weights")

log = logging.getLogger(__name__)


@dataclass
class Recorder:
    """Writes the folder of one run while the run goes on. The folder is locked meanwhile."""

    folder: Path
    seconds: float = 0.0  # of all rounds so far, before and after a halt
    _files: dict[str, Appended] = field(default_factory=dict)
    _lock: Lock = field(init=False)
    _seal: SealWriter = field(init=False)

    def __post_init__(self) -> None:
        self._lock, self._seal = Lock(self.folder), SealWriter(self.folder)

    def take(self) -> None:
        """Make the folder and lock it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.take()
        except OSError as error:
            raise InputError(f"cannot write the run to {self.folder}: {error.strerror}") from None

    def begin(self, manifest: Mapping[str, Any]) -> None:
        """Start a new record. It replaces what is in the folder."""
        # the manifest first: a folder without one is not taken for a run
        for name in ("manifest.json", "summary.json", "confusion.json", *WEIGHTS, *LINES):
            (self.folder / name).unlink(missing_ok=True)
        checkpoint.remove(self.folder)
        self._seal.begin([], {})
        self._open()
        self._write("manifest.json", {**manifest, "sealed": True})

    def go_on(self, manifest: Mapping[str, Any], after: int) -> list[Row]:
        """Continue a record after a round, and return the rows up to there.

        Lines of later rounds, and an incomplete last line, are cut off.
        """
        text, before = self._manifest()
        for key in SAME:
            old, new = before.get(key), manifest.get(key)
            if old != new:
                raise InputError(
                    f"the run in {self.folder} cannot be continued: its {key} was {old}, now {new}"
                )
        old, new = (page.get("experiment", {}).get("metrics") for page in (before, manifest))
        if list(old or []) != list(new or []):
            raise InputError(
                f"the run in {self.folder} cannot be continued: its metrics were {old}, now {new}"
            )
        for later in checkpoint.rounds(self.folder):
            if later > after:  # its rows are cut off here
                checkpoint.remove_round(self.folder, later)
        rows, timings = (self._cut(name, after) for name in LINES)
        if len(rows) != after:
            raise InputError(
                f"the run in {self.folder} has a checkpoint of round {after},"
                f" but the rows of {len(rows)} rounds"
            )
        try:
            history = [parsed(line) for line in rows]
            self.seconds = sum(parsed(line)["seconds"] for line in timings)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"the run in {self.folder} cannot be read: {error!r}") from None
        self._seal.begin(zip(rows, timings, strict=False), {"manifest.json": text})
        self._open()
        turn = {"after": after, **{key: manifest[key] for key in CIRCUMSTANCES}}
        if differs := differences(before, manifest):
            turn["differs"] = differs
            changes = ", ".join(f"{key} {now} (was {was})" for key, (was, now) in differs.items())
            log.warning(
                "%s continues with %s: numbers may differ by rounding", self.folder, changes
            )
        before.pop("ended", None)
        resumed = [*before.get("resumed", []), turn]
        self._write("manifest.json", {**before, "sealed": True, "resumed": resumed})
        return history

    def _cut(self, name: str, after: int) -> list[bytes]:
        """Cut a file after the complete lines of rounds up to `after`, and return these."""
        path = self.folder / name
        kept = complete_lines(path.read_bytes())[:after]
        os.truncate(path, sum(map(len, kept)))
        return kept

    def _open(self) -> None:
        self._files = {name: Appended(self.folder / name) for name in LINES}

    def row(self, row: Row, seconds: float) -> None:
        """Write the line of a round, and the seconds it took."""
        self.seconds += seconds
        timing = {"round": row["round"], "seconds": round(seconds, 6)}
        lines = [
            (json.dumps(_without_nan(content), allow_nan=False) + "\n").encode()
            for content in (row, timing)
        ]
        self._seal.round(row["round"], lines)
        for name, line in zip(LINES, lines, strict=True):
            self._files[name].append(line)

    def keep(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a small JSON file beside the rows."""
        self.put(name, (json.dumps(content) + "\n").encode())

    def put(self, name: str, content: bytes) -> None:
        """Write a file beside the rows, completely or not at all."""
        self._seal.file(name, content)
        put(self.folder / name, content)

    def sync(self) -> None:
        """Wait until the rows are on disk; a checkpoint relies on them."""
        self._seal.sync()
        for file in self._files.values():
            file.sync()

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
        self._seal.close()
        for file in self._files.values():
            file.close()
        self._lock.give_back()

    def _extend_manifest(self, facts: Mapping[str, Any]) -> None:
        self._write("manifest.json", {**self._manifest()[1], **facts})

    def _manifest(self) -> tuple[bytes, dict[str, Any]]:
        """Return the manifest on disk: its text and its value."""
        text = (self.folder / "manifest.json").read_bytes()
        try:
            return text, dict(parsed(text))
        except (ValueError, TypeError) as error:
            raise InputError(f"the run in {self.folder} cannot be read: {error!r}") from None

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        self.put(name, in_json(content))


def in_json(content: Mapping[str, Any]) -> bytes:
    """Return the content of a JSON file for people to read."""
    return (json.dumps(_without_nan(content), indent=2) + "\n").encode()


def _without_nan(value: Any) -> Any:
    """Return a value with null for NaN and infinity, such as the loss of a run that diverged.

    JSON has neither.
    """
    if isinstance(value, Mapping):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
