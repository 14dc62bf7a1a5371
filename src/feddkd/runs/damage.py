"""Checking the files of a run against its seal."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from feddkd.runs.files import DamagedRunError, content_of
from feddkd.runs.seal import LINES, SEAL, RunningDigest, Seal, read_seal

TEXTS = ("manifest.json", "partition.json", "confusion.json", "summary.json", *LINES)
WEIGHTS = ("final.safetensors", "private.safetensors")


class Flaw(NamedTuple):
    """A file of a run that was changed since it was written."""

    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.file} {self.what}"


class Checked(NamedTuple):
    """The result of a check."""

    sealed: bool  # False: an older version wrote the run, and nothing can be checked
    flaws: list[Flaw]
    rounds: int  # rows that are whole, from the first on


def contents(folder: Path, names: tuple[str, ...] = TEXTS) -> dict[str, bytes]:
    """Return the contents of those files of a run that are there."""
    found = {name: content_of(folder / name) for name in names}
    return {name: content for name, content in found.items() if content is not None}


def check(folder: Path, weights: bool = True) -> Checked:
    """Check all files of a run; without `weights`, only those with text."""
    return check_contents(folder, contents(folder, (*TEXTS, *WEIGHTS) if weights else TEXTS))


def check_contents(folder: Path, found: Mapping[str, bytes]) -> Checked:
    """Check contents of files of a run, which were read before."""
    seal = read_seal(folder)
    lines = {name: complete_lines(found.get(name, b"")) for name in LINES}
    if seal is None:
        lost = b'"sealed": true' in found.get("manifest.json", b"")
        flaws = [Flaw(SEAL, "is missing")] if lost else []
        return Checked(lost, flaws, min(map(len, lines.values())))
    good = {name: _whole_lines(seal, name, lines[name]) for name in LINES}
    flaws = [*_of_seal(seal), *_of_files(folder, seal, found)]
    over = "summary.json" in found  # it is written last
    flaws += [
        flaw for name in LINES for flaw in _of_lines(seal, name, len(lines[name]), good[name], over)
    ]
    return Checked(True, flaws, min(good.values()))


def raise_if_damaged(folder: Path, checked: Checked) -> None:
    """Raise a DamagedRunError that names the damaged files."""
    if checked.flaws:
        damage = "; ".join(map(str, checked.flaws))
        raise DamagedRunError(
            f"the run in {folder} is damaged: {damage}; `feddkd check` says what can be repaired"
        )


def complete_lines(content: bytes) -> list[bytes]:
    """Return the complete lines; a crash may have cut the last one."""
    return [line + b"\n" for line in content.split(b"\n")[:-1]]


def _of_seal(seal: Seal) -> Iterator[Flaw]:
    if seal.damaged is not None:
        yield Flaw(SEAL, f"is damaged in line {seal.damaged}")


def _of_files(folder: Path, seal: Seal, found: Mapping[str, bytes]) -> Iterator[Flaw]:
    """Yield flaws of the files that are written as a whole."""
    for name, content in found.items():
        if name not in LINES and not seal.matches(name, content):
            yield Flaw(name, "is damaged: it differs from the seal of the run")
    for name in seal.files:
        if "summary.json" in found and not (folder / name).exists():
            yield Flaw(name, "is missing")


def _whole_lines(seal: Seal, name: str, lines: Sequence[bytes]) -> int:
    """Return the number of lines, from the first on, that agree with their digests."""
    running, good = RunningDigest(), 0
    for number, line in enumerate(lines, 1):
        if running.after(line) == seal.rounds.get(number, {}).get(name):
            good = number
    return good


def _of_lines(seal: Seal, name: str, lines: int, good: int, over: bool) -> Iterator[Flaw]:
    """Yield flaws of a file with a line for each round."""
    if good < lines:
        yield Flaw(name, f"is damaged from line {good + 1} on: it differs from the seal of the run")
    elif over and lines < max(seal.rounds, default=0):
        yield Flaw(name, f"has {lines} of {max(seal.rounds)} lines")
