"""Data sources by name: published data sets, your own files, rendered digits.

Importing this package registers every source in SOURCES.
"""

from typing import Any

from feddkd.data.sources import digit_domains as digit_domains
from feddkd.data.sources import grammar as grammar
from feddkd.data.sources import image_folders as image_folders
from feddkd.data.sources import own_files as own_files
from feddkd.data.sources import published as published
from feddkd.data.sources import published_clients as published_clients
from feddkd.data.sources import rendered_digits as rendered_digits
from feddkd.data.sources import tables as tables
from feddkd.data.sources.registry import SOURCES as SOURCES
from feddkd.old_paths import attribute


def __getattr__(name: str) -> Any:
    """Return a name that stood here in version 0.1."""
    return attribute(__name__, "feddkd.data.sources.published", name)
