"""Damage to the files of a run, and what follows: for test_damage.py and tools/damage.py."""

import logging
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from feddkd import InputError
from feddkd.runs.record import find, folder_name
from feddkd.runs.runner import execute
from interrupted import OFTEN, content, experiment
from playing import execute as execute_watched

Damage = Callable[[Path, random.Random], None]


class CutError(Exception):
    pass


def flip(path: Path, dice: random.Random) -> None:
    """Change one bit."""
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


def cut(path: Path, dice: random.Random) -> None:
    """Cut the file at some byte."""
    path.write_bytes(path.read_bytes()[: dice.randrange(path.stat().st_size)])


def swap(path: Path, dice: random.Random) -> None:
    """Swap two parts of the file: two lines if it has several."""
    data = path.read_bytes()
    parts = data.splitlines(keepends=True)
    if len(parts) < 2:
        parts = [data[:9], data[9:18], data[18:]]
    one, other = dice.sample(range(len(parts)), 2)
    parts[one], parts[other] = parts[other], parts[one]
    path.write_bytes(b"".join(parts))


def repeat(path: Path, dice: random.Random) -> None:
    """Write a line of the file twice."""
    parts = path.read_bytes().splitlines(keepends=True)
    at = dice.randrange(len(parts))
    path.write_bytes(b"".join([*parts[: at + 1], *parts[at:]]))


def duplicate(path: Path, dice: random.Random) -> None:
    """Put a copy beside the file, as tools that synchronise folders do."""
    shutil.copy(path, path.with_name(f"{path.stem} (copy){path.suffix}"))


def remove(path: Path, dice: random.Random) -> None:
    """Remove the file."""
    path.unlink()


def nest(path: Path, dice: random.Random) -> None:
    """Write JSON that is nested more deeply than it can be read."""
    path.write_bytes(dice.choice((b"[", b'{"a":')) * 100_000)


def occupy(path: Path, dice: random.Random) -> None:
    """Put a folder in the place of the file."""
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Damage] = {
    function.__name__: function
    for function in (flip, cut, swap, repeat, duplicate, remove, nest, occupy)
}


def unseal(folder: Path) -> None:
    """Make a run look like one of version 0.1, which wrote no seal."""
    (folder / "seal.jsonl").unlink()
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"sealed": true', '"sealed": false'))


def halted_run(out: Path) -> Path:
    """Leave a run that was cut off in round 5 of 6; return its folder."""
    one = experiment()

    def stop(index: int, row: dict[str, object]) -> None:
        if row["round"] == 5:
            raise CutError

    with suppress(CutError):
        execute_watched([one], out=out, on_row=stop, engine="serial", every=OFTEN)
    return out / folder_name(one)


def finished_run(out: Path) -> Path:
    """Leave a run that is finished; return its folder."""
    one = experiment()
    execute([one], out=out, engine="serial")
    return out / folder_name(one)


def outcome(out: Path, whole: dict[str, bytes]) -> str:
    """Run the experiment on a damaged folder. Return what happened: same, repaired, refused."""
    with _warnings() as said:
        try:
            (summary,) = execute([experiment()], out=out, engine="serial", every=OFTEN)
        except (InputError, OSError):
            return "refused"
        if "ended" in summary:
            return "refused"
        find(out)  # raises an error if a file is damaged
    left = {name: text for name, text in content(out).items() if "(copy)" not in name}
    assert left == whole, "the numbers differ"
    return "repaired" if said else "same"


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect what the library says."""
    said: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    library, lines = logging.getLogger("feddkd"), Lines(logging.WARNING)
    library.addHandler(lines)
    try:
        yield said
    finally:
        library.removeHandler(lines)
