"""A user's own data, from files: arrays or a table.

Data without a test set are divided once, class by class, by a fixed key: the division is the same
for every experiment and seed.
"""

import csv as comma_separated
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch

from feddkd.data.batches import Indices
from feddkd.data.examples import Data, Examples, examples, from_arrays
from feddkd.data.sources import formats
from feddkd.data.sources.file_reading import Array, reads
from feddkd.data.sources.registry import SOURCES, Source
from feddkd.data.tables import numbered, split_rows
from feddkd.errors import InputError, unknown
from feddkd.spec.types import LATER, Bound, Positive

Part = Annotated[float, Bound(above=0, below=1)]
Classes = Annotated[int, Bound(least=1, most=10**6)]
AS_IT_IS = "normalise(mean=0.0, std=1.0)"


@SOURCES.register
def npz(path: str) -> Source:
    """Your own arrays: an .npz file with x_train, y_train, x_test and y_test.

    It may also have owner_train and owner_test, the number of the owner of each example, for
    partition = "owners()".
    """
    names = ("x_train", "y_train", "x_test", "y_test")

    def load(root: Path | None) -> Data:
        arrays = formats.npz(find_path(root, path), names, ("owner_train", "owner_test"))
        train, test = arrays[0:2], arrays[2:4]
        if len(arrays) == 4:
            return _checked(path, train, test)
        for owner, y in zip(arrays[4:], (train[1], test[1]), strict=True):
            if owner.shape != y.shape[:1]:
                raise InputError(f"{path}: {len(y)} examples need {len(y)} owners: {owner.shape}")
        owners, domains = numbered([str(owner) for owner in np.concatenate(arrays[4:]).tolist()])
        first, second = map(torch.from_numpy, np.split(owners, [len(train[1])]))
        return _checked(path, [*train, first], [*test, second], domains)

    summary = f"your own arrays: an .npz with {', '.join(names)}"
    return Source(load, (path,), "your own arrays", AS_IT_IS, summary)


@SOURCES.register
def test_only(path: str) -> Source:
    """A server's test examples, where clients have their own: an .npz with x_test and y_test."""

    def load(root: Path | None) -> Data:
        arrays = formats.npz(find_path(root, path), ("x_test", "y_test"))
        data = _checked(path, arrays, arrays)
        return replace(data, train=Examples(data.test.x[:0], data.test.y[:0]))

    summary = (
        "a server's test examples: an .npz with x_test, y_test; clients have their own (partition"
        " elsewhere, feddkd flower)"
    )
    return Source(load, (path,), "your own arrays", AS_IT_IS, summary)


@SOURCES.register
def described(shape: str, classes: Classes, scale: Positive = 1.0) -> Source:
    """No examples, only their shape (as in `1x28x28`), classes and scale: clients have them all.

    `scale` is the largest value of a pixel, which becomes 1: 255 for bytes.
    """
    parts = shape.split("x")
    if not all(part.isascii() and part.isdecimal() and 0 < int(part) < 2**16 for part in parts):
        raise InputError(f"shape must be sizes with x between them, as in '1x28x28', not {shape!r}")
    sizes, labels = tuple(map(int, parts)), tuple(str(label) for label in range(classes))

    def load(root: Path | None) -> Data:
        blank = Examples(torch.zeros(1, *sizes), torch.zeros(1, dtype=torch.int64))
        none = Examples(blank.x[:0], blank.y[:0])
        return Data("described", none, blank, classes, labels, scale)

    summary = (
        "no examples at the server, only their shape and classes; clients have their own, and test"
        " examples, too (partition elsewhere(tests=True), feddkd flower)"
    )
    return Source(load, (), "", AS_IT_IS, summary)


@SOURCES.register
def csv(
    path: str,
    label: str = "label",
    domain: str | None = None,
    test: Part = 0.2,
    owner: Annotated[str | None, LATER] = None,
) -> Source:
    """Your own table: a CSV file with column names in its first line, and a column of labels.

    `domain`, or `owner`, is the column with the domain of each row: `partition = "domains()"` then
    makes one client of each domain, and "owners()" of some. All other columns must be numbers. A
    share `test` of every class (of every domain) is the test set. Each column is scaled so that the
    other rows have mean 0 and deviation 1.
    """

    if domain is not None and owner is not None:
        raise InputError("data source 'csv': domain and owner mean the same: give one of them")
    whose = owner if domain is None else domain

    def load(root: Path | None) -> Data:
        table = _read_csv(find_path(root, path), label, whose)
        y, labels = numbered(table.labels)
        d, domains = numbered(table.domains)
        tested, trained = split_rows(y + len(labels) * d, test)
        mean, deviation = table.x[trained].mean(axis=0), table.x[trained].std(axis=0)
        scaled = (table.x - mean) / np.where(deviation > 0, deviation, 1)
        x = torch.from_numpy(scaled.astype(np.float32))

        def part(rows: Indices) -> Examples:
            domain_of = torch.from_numpy(d[rows]) if whose else None
            return Examples(x[rows], torch.from_numpy(y[rows]), domain_of)

        names = domains if whose else ()
        return from_arrays(
            part(trained), part(tested), name=Path(path).stem, labels=labels, domains=names
        )

    summary = "your own table: a CSV file with a column of labels"
    return Source(load, (path,), "your own table", AS_IT_IS, summary)


def find_path(root: Path | None, path: str) -> Path:
    """Return the path inside the data folder if it exists there, else the path itself."""
    inside = (root or Path()) / path
    return inside if inside.exists() else Path(path)


def _checked(
    path: str, train: Sequence[Any], test: Sequence[Any], domains: tuple[str, ...] = ()
) -> Data:
    """Return the data of arrays x and y, with the owners of examples if they have any."""
    name = Path(path).stem
    try:
        if not domains:
            return from_arrays(tuple(train), tuple(test), name=name, class_labels=None)
        parts = [replace(examples(tuple(p[:2]), None), domain=p[2]) for p in (train, test)]
        return from_arrays(*parts, name=name, domains=domains, class_labels=None)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


class CsvTable(NamedTuple):
    """The content of a CSV file: numbers, and the label and domain of each row."""

    x: Array
    labels: list[str]
    domains: list[str]


@reads("a CSV table")
def _read_csv(path: Path, label: str, domain: str | None) -> CsvTable:
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = comma_separated.reader(file)
        names = next(lines)
        rows = [_row(path, lines.line_num, names, cells) for cells in lines if cells]
    words = [name for name in (label, domain) if name is not None]
    for name in words:
        if name not in names:
            raise unknown(f"{path} has no column {name!r}", name, names, "it has")
    columns = [name for name in names if name not in words]
    x = [[_number(path, line, name, row[name]) for name in columns] for line, row in rows]
    if not x or not columns:
        raise InputError(
            f"{path} has {len(x)} lines with {len(columns)} columns of numbers: it must have both"
        )
    labels = [row[label] for _, row in rows]
    return CsvTable(np.array(x), labels, [row[domain] if domain else "" for _, row in rows])


def _row(path: Path, line: int, names: list[str], cells: list[str]) -> tuple[int, dict[str, str]]:
    if len(cells) != len(names):
        raise InputError(
            f"{path}, line {line} has {len(cells)} cells, but the first line names {len(names)}"
            " columns"
        )
    return line, dict(zip(names, (cell.strip() for cell in cells), strict=True))


def _number(path: Path, line: int, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"{path}, line {line}, column {name!r}: {text!r} is not a number")
    return value
