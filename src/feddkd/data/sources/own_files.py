"""Data of one's own, from the files people have: arrays, a table, a folder of images.

What comes without a test set is divided once, class by class, by a fixed key: the same for every
experiment and seed.
"""

import csv as comma_separated
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch

from feddkd.data.batches import Indices
from feddkd.data.examples import Data, Examples, from_arrays
from feddkd.data.federation import stratified
from feddkd.data.sources import formats
from feddkd.data.sources.formats import Array, reads
from feddkd.data.sources.registry import SOURCES, Source
from feddkd.errors import InputError, choices
from feddkd.spec.types import Bound

Side = Annotated[int, Bound(least=1, most=1024)]  # more is a slip
Part = Annotated[float, Bound(above=0, below=1)]
IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
AS_IT_IS = "normalise(mean=0.0, std=1.0)"


@SOURCES.register
def npz(path: str) -> Source:
    """Your own arrays: an .npz file with x_train, y_train, x_test and y_test."""
    names = ("x_train", "y_train", "x_test", "y_test")

    def load(root: Path | None) -> Data:
        found = formats.npz(_found(root, path), names)
        try:
            return from_arrays((found[0], found[1]), (found[2], found[3]), name=Path(path).stem)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error

    summary = f"your own arrays: an .npz with {', '.join(names)}"
    return Source(load, (path,), "your own arrays", AS_IT_IS, summary)


@SOURCES.register
def test_only(path: str) -> Source:
    """What a server holds whose clients bring their own examples: an .npz file with x_test and
    y_test.
    """

    def load(root: Path | None) -> Data:
        pair = formats.npz(_found(root, path), ("x_test", "y_test"))
        try:
            whole = from_arrays(tuple(pair), tuple(pair), name=Path(path).stem)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error
        return replace(whole, train=Examples(whole.test.x[:0], whole.test.y[:0]))

    summary = (
        "a server's test examples: an .npz with x_test, y_test; clients bring their own (partition"
        " elsewhere, feddkd flower)"
    )
    return Source(load, (path,), "your own arrays", AS_IT_IS, summary)


@SOURCES.register
def csv(path: str, label: str = "label", domain: str | None = None, test: Part = 0.2) -> Source:
    """Your own table: a CSV file whose first line names the columns; all but label and domain are
    numbers.

    `domain` names the column that says whose row it is: `partition = "domains()"` then makes a
    client of each. A share `test` of every class (of every domain) is set aside to test on. Columns
    are scaled to mean 0 and deviation 1 of the rest.
    """

    def load(root: Path | None) -> Data:
        table = _table(_found(root, path), label, domain)
        y, labels = _numbered(table.labels)
        d, domains = _numbered(table.domains)
        held, kept = _parts(y + len(labels) * d, test)
        centre, width = table.x[kept].mean(axis=0), table.x[kept].std(axis=0)
        x = torch.from_numpy(
            ((table.x - centre) / np.where(width > 0, width, 1)).astype(np.float32)
        )
        train, tested = (
            Examples(
                x[part], torch.from_numpy(y[part]), torch.from_numpy(d[part]) if domain else None
            )
            for part in (kept, held)
        )
        return from_arrays(
            train, tested, name=Path(path).stem, labels=labels, domains=domains if domain else ()
        )

    return Source(
        load,
        (path,),
        "your own table",
        AS_IT_IS,
        "your own table: a CSV file with a column of labels",
    )


@SOURCES.register
def folder(path: str, side: Side = 32, colour: bool = True, test: Part = 0.2) -> Source:
    """Your own images: a folder with a folder of images for each class, or with such folders under
    train/ and test/.

    Images are resized to `side` x `side` pixels, in colour or grey. Without train/ and test/, a
    share `test` of every class is set aside to test on.
    """

    def load(root: Path | None) -> Data:
        base = _found(root, path)
        if all((base / part).is_dir() for part in ("train", "test")):
            parts = [_pictures(base / part, side, colour) for part in ("train", "test")]
            y, labels = _numbered([*parts[0][1], *parts[1][1]])
            x = np.concatenate([x for x, _ in parts])
            kept, held = np.split(np.arange(len(y)), [len(parts[0][1])])
        else:
            x, words = _pictures(base, side, colour)
            y, labels = _numbered(words)
            held, kept = _parts(y, test)
        return from_arrays(
            (x[kept], y[kept]), (x[held], y[held]), name=base.resolve().name, labels=labels
        )

    summary = "your own images: a folder with a folder for each class"
    return Source(load, (path,), "your own images", "normalise(mean=0.5, std=0.5)", summary)


def _found(root: Path | None, path: str) -> Path:
    inside = (root or Path()) / path
    return inside if inside.exists() else Path(path)


def _parts(groups: Indices, test: float) -> tuple[Indices, Indices]:
    held, kept = stratified(groups, test, 1 - test, ("own test set",))
    if not len(held):
        raise InputError(f"test={test:g} sets nothing aside: no class has enough examples")
    return held, kept


def _numbered(words: Sequence[str]) -> tuple[Indices, tuple[str, ...]]:
    """Words as numbers, and the words in order: whole numbers by size, before everything else."""
    names = sorted(
        set(words), key=lambda word: (float(word) if word.isdecimal() else math.inf, word)
    )
    place = {name: number for number, name in enumerate(names)}
    return np.array([place[word] for word in words], np.int64), tuple(names)


class CsvTable(NamedTuple):
    x: Array
    labels: list[str]
    domains: list[str]


@reads("a CSV table")
def _table(path: Path, label: str, domain: str | None) -> CsvTable:
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = comma_separated.reader(file)
        names = next(lines)
        rows = [_row(path, lines.line_num, names, cells) for cells in lines if cells]
    words = [name for name in (label, domain) if name is not None]
    for name in words:
        if name not in names:
            raise InputError(f"{path} has no column {name!r}; there are: {choices(names)}")
    read = [name for name in names if name not in words]
    x = [[_number(path, line, name, row[name]) for name in read] for line, row in rows]
    if not x or not read:
        raise InputError(f"{path} has {len(x)} lines of {len(read)} numbers: nothing to learn from")
    return CsvTable(
        np.array(x),
        [row[label] for _, row in rows],
        [row[domain] if domain else "" for _, row in rows],
    )


def _row(path: Path, line: int, names: list[str], cells: list[str]) -> tuple[int, dict[str, str]]:
    if len(cells) != len(names):
        raise InputError(
            f"{path}, line {line}: {len(cells)} cells, and the first line names {len(names)}"
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


@reads("a folder of images, one folder for each class")
def _pictures(path: Path, side: int, colour: bool) -> tuple[Array, list[str]]:
    files = sorted(file for file in path.glob("*/*") if file.suffix.lower() in IMAGES)
    if not files:
        raise InputError(
            f"{path} has no folders with images; a class is a folder, and images end in"
            f" {choices(IMAGES)}"
        )
    return np.stack([_picture(file, side, colour) for file in files]), [
        file.parent.name for file in files
    ]


@reads("an image")
def _picture(path: Path, side: int, colour: bool) -> Array:
    from PIL import Image

    with Image.open(path) as image:
        pixels = np.asarray(
            image.convert("RGB" if colour else "L").resize((side, side), Image.Resampling.BILINEAR)
        )
    return pixels.reshape(side, side, -1).transpose(2, 0, 1)
