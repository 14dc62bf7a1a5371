"""The version, and the commit of a checkout. The build reads this file, so it imports no torch."""

import subprocess
from functools import cache
from pathlib import Path

__version__ = "0.1.0"


@cache
def commit() -> tuple[str, bool] | None:
    """Return the commit of this code, and whether its files were changed since; None if git is
    missing or this file is not in a repository.
    """
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None  # an installed package, even inside another repository
    head, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--", "*.py")
    return None if head is None else (head, bool(changes))


def _git(*words: str) -> str | None:
    """Return git's answer about the folder of this file; None if it has none."""
    try:
        done = subprocess.run(
            ["git", *words],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
