"""Data from a function in a user's own Python file."""

from pathlib import Path
from typing import Any

from feddkd.data.examples import Data, from_arrays
from feddkd.data.sources import SOURCES
from feddkd.data.sources.own_files import AS_IT_IS
from feddkd.data.sources.registry import Source
from feddkd.errors import InputError
from feddkd.spec.python_file import names_file, read_file_function


def find_source(text: str) -> Source:
    """Return the data source of a text: a registered name, or `FILE.py:function(options)`.

    The function gets the options as keywords, and the folder of `--data` if it has a parameter
    `folder`. It returns `Data`, or the pair (train, test), where each is what `from_arrays` takes:
    a pair (x, y) of arrays or tensors, or a data set.
    """
    if not names_file(text):
        return SOURCES.one(text)
    function = read_file_function("data source", text)

    def load(folder: Path | None) -> Data:
        made: Any = function(folder=folder)
        if isinstance(made, Data):
            return made
        if not isinstance(made, tuple | list) or len(made) != 2:
            kind = type(made).__name__
            raise InputError(f"{text} must return Data or a pair (train, test), not {kind}")
        try:
            return from_arrays(made[0], made[1], name=function.name, class_labels=None)
        except InputError as error:
            raise InputError(f"{text}: {error}") from error

    summary = f"your own data: {text}"
    files = (str(function.path),)
    return Source(load, files, "your own file", AS_IT_IS, summary, calls=(function.spelled,))
