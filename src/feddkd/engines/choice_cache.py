"""Choices of strategies and compiled programs that are kept from one run to the next.

They are in the user's cache folder.

There is one small JSON file for each kind of work, and a folder for torch's compiler. A choice
changes the speed of a run, and its numbers by rounding only, so a file that is missing, damaged or
wrong costs time and nothing else.
The environment variable FEDDKD_CACHE names another folder, or is "off".
"""

import hashlib
import json
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

MOST_FILES = 2000
MOST_BYTES = 4 << 30  # of compiled programs
DAY = 86_400.0
PARTS = ("choices", "programs")
OFF = ("off", "0", "no")


def cache_folder() -> Path | None:
    """Return the folder of kept choices and compiled programs; None if it is switched off."""
    asked = os.environ.get("FEDDKD_CACHE", "")
    if asked.lower() in OFF:
        return None
    if asked:
        return Path(asked)
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "feddkd"


def digest_of(*parts: object) -> str:
    """Return a digest of values that decide how long a kind of work takes."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def choices_folder() -> Path | None:
    """Return the folder of kept choices; None if the cache is switched off."""
    folder = cache_folder()
    return None if folder is None else folder / "choices"


def kept_choice(digest: str) -> dict[str, Any]:
    """Return what is known of a kind of work, or nothing."""
    folder = choices_folder()
    with suppress(OSError, ValueError, AttributeError, TypeError, LookupError):
        if folder is not None:
            found = json.loads((folder / f"{digest}.json").read_text(encoding="utf-8"))
            numbers = {
                part: {str(name): float(value) for name, value in found[part].items()}
                for part in ("seconds", "costs")
            }
            return {"strategy": str(found["strategy"]), **numbers}
    return {}


def keep_choice(digest: str, known: dict[str, Any]) -> None:
    """Write what is known of a kind of work; do nothing if that is not possible.

    The file is replaced as a whole, so several processes may write at the same time.
    """
    folder = choices_folder()
    if folder is None:
        return
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=folder, suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(known, file)
            os.replace(part, folder / f"{digest}.json")
        finally:
            Path(part).unlink(missing_ok=True)
        _remove_oldest(folder)


def _remove_oldest(folder: Path) -> None:
    files = list(folder.glob("*"))
    if len(files) > MOST_FILES:
        files.sort(key=_time_of)
        for path in files[: -MOST_FILES // 2]:
            path.unlink(missing_ok=True)


def _time_of(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another process has removed it
        return 0.0


def keep_compiled_programs() -> None:
    """Let torch's compiler keep its programs in the cache, if its own variable names no folder."""
    folder = cache_folder()
    if folder is not None:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "programs"))


def limit_programs() -> None:
    """Delete compiled programs that have been unused for longest, above the limit of bytes.

    Programs of the last day stay, since another process may be using them.
    """
    folder = cache_folder()
    if folder is None:
        return
    files = sorted(_files(folder / "programs"), key=_time_of)
    excess = sum(map(_size_of, files)) - MOST_BYTES
    for path in files:
        if excess <= 0 or _time_of(path) > time.time() - DAY:
            return
        excess -= _size_of(path)
        path.unlink(missing_ok=True)


def cache_contents() -> tuple[dict[str, int], int]:
    """Return the number of files in each part of the cache, and the bytes of all."""
    folder = cache_folder()
    parts = {} if folder is None else {part: _files(folder / part) for part in PARTS}
    counts = {part: len(files) for part, files in parts.items() if files}
    return counts, sum(_size_of(path) for files in parts.values() for path in files)


def empty_cache() -> None:
    """Delete the parts of the cache, and nothing else that may be in its folder."""
    folder = cache_folder()
    if folder is not None:
        for part in PARTS:
            shutil.rmtree(folder / part, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # another process has removed it
        return 0
