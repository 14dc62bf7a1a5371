"""Columns of a table: of a DataFrame, an Arrow table, a Hugging Face data set, or a dict."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from feddkd.data.conversion import in_words, is_table, tensor_of
from feddkd.data.sequences import differ_in_length, filled
from feddkd.errors import InputError, choices, unknown
from feddkd.tasks.task import IGNORED


class DataColumn(NamedTuple):
    """The values of a column."""

    name: str
    values: Any  # an array of numbers or texts (N,), or a list of arrays, sequences or pictures
    labels: tuple[str, ...] = ()  # names of the values 0, 1, ..., if the table has them

    @property
    def numeric(self) -> bool:
        """Each value is a number or a truth value."""
        return isinstance(self.values, np.ndarray) and self.values.dtype.kind in "biuf"

    @property
    def textual(self) -> bool:
        """Each value is a text."""
        return isinstance(self.values, np.ndarray) and self.values.dtype.kind == "U"

    def target(self) -> Tensor:
        """Return the values as targets: sequences of different lengths are padded with -100."""
        return filled(self.rows(), IGNORED)

    def rows(self) -> Sequence[Tensor] | Tensor:
        """Return the values as tensors, whose first axes alone may differ."""
        if self.numeric:
            return tensor_of(self.values, f"column {self.name!r}")
        if self.textual:
            raise InputError(
                f"column {self.name!r} holds texts: it can be the only x, or y, or the owner; among"
                " several columns, turn it into numbers first"
            )
        tensors = [tensor_of(value, f"column {self.name!r}") for value in self.values]
        one_kind = len({(tensor.shape, tensor.dtype) for tensor in tensors}) == 1
        if not one_kind and not differ_in_length(tensors):
            raise InputError(f"the values of column {self.name!r} must all have one shape and type")
        return tensors


def columns_of(table: Any) -> dict[str, Any]:
    """Return the keys of a table's columns by their names."""
    if type(table).__name__ == "DatasetDict":
        raise InputError(
            f"a DatasetDict has several tables ({', '.join(table)}): give the one to train on, and"
            " as second argument the one to test on"
        )
    if not isinstance(table, Mapping) and not is_table(table):
        raise InputError(
            "a table must be a DataFrame, an Arrow table, a Hugging Face data set or a dict of"
            f" columns, not {in_words(table)}"
        )
    keys = list(getattr(table, "column_names", None) or getattr(table, "columns", table))
    names = [str(key) for key in keys]
    if twice := {name for name, count in Counter(names).items() if count > 1}:
        raise InputError(f"the table has several columns with the name {choices(twice)}")
    return dict(zip(names, keys, strict=True))


def count_rows(table: Any) -> int:
    """Return the number of rows of a table; raise InputError if columns differ in it."""
    names = columns_of(table)
    of_dict = isinstance(table, Mapping)
    counts = {len(table[key]) for key in names.values()} if of_dict else {len(table)}
    if len(counts) != 1 or not names or not min(counts):
        raise InputError(f"the columns of a table have one length, above 0; these have {counts}")
    return counts.pop()


def read_column(table: Any, name: str) -> DataColumn:
    """Return a column of a table; raise InputError if there is none, or if a value is missing."""
    columns = columns_of(table)
    if name not in columns:
        raise unknown(f"the table has no column {name!r}", name, columns, "it has")
    labels = getattr(getattr(table, "features", {}).get(name), "names", None) or ()
    return DataColumn(name, _values(name, table[columns[name]]), tuple(labels))


def _values(name: str, given: Any) -> Any:
    """Return the values of a column as an array of numbers or of texts, or as a list."""
    if isinstance(given, Tensor):
        given = given.numpy()
    elif hasattr(given, "to_numpy"):
        given = _from_numpy(given)
    if isinstance(given, np.ndarray) and given.dtype.kind in "biufU":
        return _complete(name, given) if given.ndim == 1 else list(given)
    values = list(given)
    if missing := [row for row, value in enumerate(values) if _is_missing(value)]:
        raise InputError(f"column {name!r} has no value in row {missing[0]}")
    if values and all(isinstance(value, str) for value in values):
        return np.array(values)
    if values and all(isinstance(value, bool | int | float | np.generic) for value in values):
        return _complete(name, np.array(values))
    return [_sequence(name, value) for value in values]


def _from_numpy(given: Any) -> Any:
    """Return a column of pandas, polars or Arrow as an array, of texts if all are texts."""
    try:
        return given.to_numpy()
    except Exception:  # Arrow refuses to copy unless it is asked
        return given.to_numpy(zero_copy_only=False)


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _complete(name: str, values: Any) -> Any:
    """Return the values, or raise InputError if one is missing or not finite."""
    wrong = np.flatnonzero(~np.isfinite(values)) if values.dtype.kind == "f" else np.arange(0)
    if len(wrong):
        raise InputError(f"column {name!r} has {values[wrong[0]]} in row {wrong[0]}, not a number")
    return values


def _sequence(name: str, value: Any) -> Any:
    """Return one value that is a sequence of numbers as an array; others unchanged."""
    if isinstance(value, list | tuple):
        value = np.array(value)
    if isinstance(value, np.ndarray) and value.dtype == object:  # rows of arrays, as in Arrow
        value = np.stack([np.asarray(row) for row in value])
    if isinstance(value, np.ndarray | Tensor) or hasattr(value, "getbands"):
        return value
    raise InputError(
        f"column {name!r} must hold numbers, texts, arrays or pictures, not {type(value).__name__}"
    )


def chosen_names(given: str | Sequence[str], what: str) -> list[str]:
    """Return the names of one or several columns; a text may list them with commas."""
    names = given.split(",") if isinstance(given, str) else list(given)
    names = [str(name).strip() for name in names]
    if not all(names) or not names:
        raise InputError(f"{what} must name one or more columns, not {given!r}")
    return names
