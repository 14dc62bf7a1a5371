"""The seal of a run: a file with the digests of the other files.

seal.jsonl   a line for each round, with the digests of rounds.jsonl and timings.jsonl up to there:
             {"round": 3, "rounds.jsonl": "5d0c...", "timings.jsonl": "91ab...", "seal": "7e22..."}
             and a line for each version of another file, {"manifest.json": "c81f...", "seal": ...}.
             `seal` is the digest of the line and of the `seal` before it.

A line is written before what it describes, so a process that is killed in between leaves a seal
that lists more than there is, never less. Whoever changes a file on purpose can change the seal
too: it shows damage, not forgery.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from feddkd.runs.files import Appended, content_of, parsed, put

SEAL = "seal.jsonl"
LINES = ("rounds.jsonl", "timings.jsonl")
# lines that may not be lost if the power fails: by these files a run is continued, or finished
RELIED_ON = ("manifest.json", "summary.json")
LENGTH = 32  # hexadecimal digits of a digest


def digest(content: bytes) -> str:
    """Return the digest of a file's content."""
    return hashlib.sha256(content).hexdigest()[:LENGTH]


class RunningDigest:
    """The digest of a file that grows line by line."""

    def __init__(self) -> None:
        self._sum = hashlib.sha256()

    def after(self, line: bytes) -> str:
        """Return the digest after one more line."""
        self._sum.update(line)
        return self._sum.hexdigest()[:LENGTH]


class SealWriter:
    """Writes the seal of one run."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / SEAL
        self._last, self._sums = "", [RunningDigest() for _ in LINES]
        self._file: Appended | None = None

    def begin(self, rounds: Iterable[Sequence[bytes]], files: Mapping[str, bytes]) -> None:
        """Replace the seal by one of these lines, a pair for each round, and these files."""
        self._last, self._sums = "", [RunningDigest() for _ in LINES]
        lines = [self._round(t, pair) for t, pair in enumerate(rounds, 1)]
        lines += [self._signed({name: digest(content)}) for name, content in files.items()]
        if lines:
            put(self.path, b"".join(lines))
        self._file = Appended(self.path, "ab" if lines else "wb")

    def round(self, number: int, lines: Sequence[bytes]) -> None:
        """Add the lines of a round, before they are written."""
        self._append(self._round(number, lines))

    def file(self, name: str, content: bytes) -> None:
        """Add a file, before it is written."""
        self._append(self._signed({name: digest(content)}))
        if name in RELIED_ON:
            self.sync()

    def sync(self) -> None:
        """Wait until the seal is on disk."""
        if self._file is not None:
            self._file.sync()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _append(self, line: bytes) -> None:
        if self._file is not None:
            self._file.append(line)

    def _round(self, number: int, lines: Sequence[bytes]) -> bytes:
        sums = [running.after(line) for running, line in zip(self._sums, lines, strict=True)]
        return self._signed({"round": number, **dict(zip(LINES, sums, strict=True))})

    def _signed(self, entry: Mapping[str, Any]) -> bytes:
        self._last = _sign(self._last, entry)
        return json.dumps({**entry, "seal": self._last}).encode() + b"\n"


def _sign(last: str, entry: Mapping[str, Any]) -> str:
    return digest((last + json.dumps(entry)).encode())


@dataclass
class Seal:
    """The content of a seal."""

    rounds: dict[int, dict[str, str]] = field(default_factory=dict)  # digests after each round
    files: dict[str, set[str]] = field(default_factory=dict)  # digests of each file's versions
    damaged: int | None = None  # the number of the first line that was changed

    def matches(self, name: str, content: bytes) -> bool:
        """Return whether a file is one of the versions that the seal lists."""
        return digest(content) in self.files.get(name, ())


def read_seal(folder: Path) -> Seal | None:
    """Return the seal in a folder; None if there is none."""
    text = content_of(folder / SEAL)
    if text is None:
        return None
    seal, last = Seal(), ""
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        entry = _entry(line)
        signature = str(entry.pop("seal", ""))
        if entry and signature == _sign(last, entry):
            _add(seal, entry)
        elif seal.damaged is None and line.endswith(b"\n"):  # a crash may cut the last line
            seal.damaged = number
        last = signature
    return seal


def _entry(line: bytes) -> dict[str, Any]:
    try:
        return dict(parsed(line))
    except (ValueError, TypeError):
        return {}


def _add(seal: Seal, entry: dict[str, Any]) -> None:
    if "round" in entry:
        seal.rounds[entry.pop("round")] = entry
    else:
        for name, content in entry.items():
            seal.files.setdefault(name, set()).add(content)
