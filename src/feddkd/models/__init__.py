"""Networks: any module as a pure function (`functional`), and networks by name (`registry`)."""

from typing import Any

from feddkd.old_paths import attribute


def __getattr__(name: str) -> Any:
    """Return a name that stood here in version 0.1."""
    return attribute(__name__, "feddkd.extend", name)
