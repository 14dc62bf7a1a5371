"""`from_table`: data from a table and the names of its columns."""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from feddkd.data.batches import Indices
from feddkd.data.columns import (
    DataColumn,
    chosen_names,
    columns_of,
    count_rows,
    read_column,
)
from feddkd.data.division import stratified
from feddkd.data.examples import Data, Examples, Words, from_arrays
from feddkd.data.sequences import padded
from feddkd.data.text import encoded, next_characters, vocabulary
from feddkd.errors import InputError
from feddkd.spec.types import Count, checked
from feddkd.trees import Tree, take

Names = str | Sequence[str]
Targets = Literal["auto", "classes", "numbers"]


class _Read(NamedTuple):
    """A table that is read: inputs, targets and owners of all rows."""

    x: Tree
    y: Tree
    labels: tuple[str, ...]  # of the classes, or of the characters of a text
    class_labels: bool
    rows: Indices  # the row of the table that each example is from
    note: str = ""
    matrix: bool = False  # the inputs are columns of numbers


def from_table(
    train: Any,
    test: Any = 0.2,
    *,
    x: Names | None = None,
    y: Names | None = None,
    owner: str | None = None,
    group: str | None = None,
    targets: Targets = "auto",
    standardise: bool = True,
    length: int = 80,
    name: str = "table",
) -> Data:
    """Return data from a table: a DataFrame, an Arrow table, a Hugging Face data set, or a dict.

    Args:
        train: The table.
        test: A second table, or the share of every class and owner that is the test set.
        x: The columns of inputs; by default all others. Columns of numbers become one matrix. One
            column may also hold arrays, pictures, sequences or texts; several such columns become a
            dict. Sequences of different lengths are padded: {"sequence": ..., "mask": ...}, or with
            several columns under their names, and "mask" if no name ends in it.
        y: The column of targets, or several columns of numbers. Without it, x is one column of
            texts, and the target of a character is the one that follows it (task `language`).
        owner: The column that says to whom a row belongs: partition = "owners()" makes a client of
            each.
        group: The column that names the group of a row. Metrics are also those of each group of
            test rows. It is no input, unless x names it.
        targets: "classes": the values of y are names of classes, whatever they are. "numbers": they
            are numbers. "auto": numbers if they have fractions, and classes otherwise.
        standardise: Scale each column of a matrix to mean 0 and deviation 1 of the training rows.
        length: How many characters of a text a row has.
        name: The name of the data.

    Names of classes are numbered in order, and the record of a run has them.
    """
    targets = checked(targets, Targets, "targets")
    length = checked(length, Count, "length")
    given = [train] if isinstance(test, float) else [train, test]
    # a LazyFrame of polars is read when it is collected
    tables = [t.collect() if type(t).__name__ == "LazyFrame" else t for t in given]
    sizes = [count_rows(table) for table in tables]
    inputs = _input_names(tables[0], x, y, owner, group)
    read = _read(tables, inputs, y, targets, length)
    owners, domains = _owners(tables, owner)
    groups = _words(tables, group, "groups") if group else None
    domain = owners[read.rows]
    if isinstance(test, float):
        tested, trained = split_rows(_groups(read, domain), test)
    else:
        tested = np.flatnonzero(read.rows >= sizes[0])
        trained = np.flatnonzero(read.rows < sizes[0])
    scaled = _standardised(read.x, trained) if standardise and read.matrix else read.x

    def part(rows: Indices) -> Examples:
        at = torch.from_numpy(rows)
        whose = torch.from_numpy(domain[rows]) if owner else None
        named = None if groups is None else groups[read.rows[rows]]
        return Examples(take(scaled, at), take(read.y, at), whose, group=named)

    return from_arrays(
        part(trained),
        part(tested),
        name=name,
        labels=read.labels,
        domains=domains,
        class_labels=read.class_labels,
        note=read.note,
    )


def split_rows(groups: Indices, test: float) -> tuple[Indices, Indices]:
    """Return the rows of the test set, a share of every group, and the other rows.

    The division is the same for every experiment and seed.
    """
    if not 0 < test < 1:
        raise InputError(f"test must be a share between 0 and 1, or other data, not {test:g}")
    tested, trained = stratified(groups, test, 1 - test, ("own test set",))
    if not len(tested):
        raise InputError(
            f"test={test:g} gives an empty test set, because no class has enough examples: raise"
            " test"
        )
    return tested, trained


def numbered(words: Sequence[str]) -> tuple[Indices, tuple[str, ...]]:
    """Return the words as numbers, and the different words in order.

    Whole numbers come first, in the order of their size.
    """

    def order(word: str) -> tuple[float, str]:
        return (float(word) if word.isdecimal() else math.inf, word)

    names = sorted(set(words), key=order)
    numbers = {name: number for number, name in enumerate(names)}
    return np.array([numbers[word] for word in words], np.int64), tuple(names)


def _input_names(
    table: Any, x: Names | None, y: Names | None, owner: str | None, group: str | None
) -> list[str]:
    """Return the columns of inputs; by default all that have no other use."""
    if x is not None:
        return chosen_names(x, "x")
    used = (*(chosen_names(y, "y") if y is not None else ()), owner, group)
    return [name for name in columns_of(table) if name not in used]


def _read(
    tables: Sequence[Any], inputs: Sequence[str], y: Names | None, targets: Targets, length: int
) -> _Read:
    goals = chosen_names(y, "y") if y is not None else []
    columns = [_joined(tables, name) for name in inputs]
    text = columns[0].values.tolist() if len(columns) == 1 and columns[0].textual else None
    if not goals and text is None:
        raise InputError(
            "y must name the column of targets; only without targets, x is one column of texts"
        )
    if not goals and text is not None:
        characters = vocabulary(text)
        found = next_characters(text, characters, length)
        return _Read(found.x, found.y, characters, False, found.texts)
    goal, labels, class_labels = _targets([_joined(tables, name) for name in goals], targets)
    every = np.arange(len(columns[0].values)) if columns else np.arange(0)
    if text is None:
        matrix = all(column.numeric for column in columns)
        return _Read(_inputs(columns), goal, labels, class_labels, every, matrix=matrix)
    characters = vocabulary(text)
    note = f"characters: padding and {''.join(characters)!r}"
    return _Read(encoded(text, characters, length), goal, labels, class_labels, every, note)


def _joined(tables: Sequence[Any], name: str) -> DataColumn:
    """Return a column with the rows of all tables."""
    parts = [read_column(table, name) for table in tables]
    values = [part.values for part in parts]
    if all(isinstance(value, np.ndarray) for value in values):
        return parts[0]._replace(values=np.concatenate(values))
    return parts[0]._replace(values=[row for value in values for row in value])


def _inputs(columns: Sequence[DataColumn]) -> Tree:
    if not columns:
        raise InputError("no column is left for x: name the columns of inputs")
    if all(column.numeric for column in columns):
        matrix = np.stack([column.values.astype(np.float64) for column in columns], axis=1)
        return torch.from_numpy(matrix.astype(np.float32))
    (one, *others) = columns
    if others:
        return padded({column.name: column.rows() for column in columns})
    rows = padded({"sequence": one.rows()})
    return rows if "mask" in rows else rows["sequence"]


def _targets(columns: Sequence[DataColumn], targets: Targets) -> tuple[Tree, tuple[str, ...], bool]:
    """Return the targets, the names of their classes, and whether they are class labels."""
    if len(columns) > 1:
        parts = [column.target() for column in columns]
        dtype = torch.float32 if any(t.is_floating_point() for t in parts) else torch.int64
        return torch.stack([part.to(dtype) for part in parts], 1), (), False
    (column,) = columns
    if not column.numeric and not column.textual:
        return column.target(), (), False
    if targets == "auto":
        targets = "numbers" if _has_fractions(column.values) else "classes"
    if targets == "numbers":
        goal = column.target()
        return goal.float() if goal.is_floating_point() else goal, (), False
    if column.labels:
        return torch.from_numpy(column.values.astype(np.int64)), column.labels, True
    words = column.values.astype(np.int64) if column.values.dtype.kind == "f" else column.values
    numbers, labels = numbered([str(word) for word in words.tolist()])
    return torch.from_numpy(numbers), labels, True


def _has_fractions(values: Any) -> bool:
    return values.dtype.kind == "f" and bool((values != np.floor(values)).any())


def _owners(tables: Sequence[Any], owner: str | None) -> tuple[Indices, tuple[str, ...]]:
    """Return the number of the owner of each row, and the owners' names."""
    if owner is None:
        return np.zeros(sum(map(count_rows, tables)), np.int64), ()
    return numbered(_words(tables, owner, "owners").tolist())


def _words(tables: Sequence[Any], name: str, what: str) -> Words:
    """Return a column of owners or groups as texts."""
    column = _joined(tables, name)
    if not column.numeric and not column.textual:
        raise InputError(f"column {name!r} of {what} must hold texts or whole numbers")
    return np.array([str(value) for value in column.values.tolist()])


def _groups(read: _Read, domain: Indices) -> Indices:
    """Return one number for the class and the owner of each example."""
    return domain * len(read.labels) + read.y.numpy() if read.class_labels else domain


def _standardised(x: torch.Tensor, trained: Indices) -> torch.Tensor:
    rows = x.double().numpy()
    mean, deviation = rows[trained].mean(axis=0), rows[trained].std(axis=0)
    scaled = (rows - mean) / np.where(deviation > 0, deviation, 1)
    return torch.from_numpy(scaled.astype(np.float32))
