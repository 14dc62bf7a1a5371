"""Tables in files: CSV, Parquet, Arrow, LEAF's JSON, FedJAX's SQLite, Hugging Face's folders."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from feddkd.data.examples import Data
from feddkd.data.sources.client_files import (
    fedjax_file,
    is_leaf_folder,
    leaf_file,
    leaf_files,
)
from feddkd.data.sources.file_reading import reads
from feddkd.data.sources.own_files import Part, find_path
from feddkd.data.sources.registry import SOURCES, Source
from feddkd.data.tables import Targets, from_table
from feddkd.errors import InputError
from feddkd.spec.types import LATER, Count, Names


@SOURCES.register
def table(
    path: str,
    x: Names | None = None,
    y: Names | None = None,
    owner: str | None = None,
    test: Part = 0.2,
    test_path: str | None = None,
    targets: Targets = "auto",
    standardise: bool = True,
    length: Count = 80,
    group: Annotated[str | None, LATER] = None,
) -> Source:
    """Your own table: a file or a folder.

    The formats: .csv, .parquet, .arrow; a folder that Hugging Face's `datasets` saved; LEAF's
    .json, or its folder with train/ and test/ (columns x, y, user); FedJAX's .sqlite (the owner is
    client_id); lines of text in a .txt, or in a folder of them (columns text, file). `x` and `y`
    name columns, with commas between them; `owner` is the column that says to whom a row belongs,
    for partition = "owners()", and `group` that of its group, for metrics of groups. The test set
    is the table `test_path`, the part "test" of a folder, or a share `test` of every class and
    owner. The rest is as in `feddkd.from_table`.
    """

    def load(root: Path | None) -> Data:
        parts = read_parts(find_path(root, path))
        tested: Any = parts.get("test", test)
        if test_path is not None:
            tested = read_parts(find_path(root, test_path))["train"]
        try:
            return from_table(
                parts["train"],
                tested,
                x=x,
                y=y,
                owner=owner,
                group=group,
                targets=targets,
                standardise=standardise,
                length=length,
                name=Path(path).stem,
            )
        except InputError as error:
            raise InputError(f"{path}: {error}") from error

    summary = "your own table: CSV, Parquet, Arrow, LEAF's JSON, FedJAX's SQLite, Hugging Face's"
    files = (path,) if test_path is None else (path, test_path)
    return Source(load, files, "your own table", "", summary)


def read_parts(path: Path) -> dict[str, Any]:
    """Return the tables in a file or folder: "train", and "test" if it is divided."""
    if (path / "dataset_dict.json").exists():
        return dict(_saved(path))
    if is_leaf_folder(path):
        return {part: leaf_files(path / part) for part in ("train", "test")}
    if path.is_dir() and any(path.glob("*.txt")):
        return {"train": _texts(path)}
    if path.is_dir():
        return {"train": _saved(path)}
    if path.suffix.lower() not in READERS:
        raise InputError(
            f"the name of a table ends in {', '.join(READERS)}, or it is a folder; not {path.name}"
        )
    return {"train": READERS[path.suffix.lower()](path)}


def _needed(package: str, what: str) -> Any:
    """Import an optional package, or raise an InputError that says how to get it."""
    from importlib import import_module

    try:
        return import_module(package)
    except ImportError:
        raise InputError(
            f"{what} needs a package that is not here: pip install 'feddkd[tables]'"
        ) from None


@reads("a CSV table")
def _csv(path: Path) -> dict[str, Any]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        names, *rows = [row for row in csv.reader(file) if row]
    for number, row in enumerate(rows, 2):
        if len(row) != len(names):
            raise InputError(
                f"{path}, row {number} has {len(row)} cells, but the first line names"
                f" {len(names)} columns"
            )
    cells = zip(*rows, strict=True)
    return {name: _cells(column) for name, column in zip(names, cells, strict=True)}


@reads("lines of text")
def _lines(path: Path) -> dict[str, Any]:
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    return {"text": [line for line in lines if line.strip()]}


def _texts(folder: Path) -> dict[str, Any]:
    """Return the lines of all texts in a folder, with the names of their files."""
    table: dict[str, Any] = {"text": [], "file": []}
    for path in sorted(folder.glob("*.txt")):
        lines = _lines(path)["text"]
        table["text"] += lines
        table["file"] += [path.stem] * len(lines)
    return table


def _cells(texts: tuple[str, ...]) -> list[Any]:
    """Return the cells of a column as whole numbers, as numbers, or unchanged."""
    for kind in (int, float):
        try:
            return [kind(text) for text in texts]
        except ValueError:
            continue
    return list(texts)


@reads("a Parquet table")
def _parquet(path: Path) -> Any:
    return _needed("pyarrow.parquet", "a Parquet table").read_table(path)


@reads("an Arrow table")
def _arrow(path: Path) -> Any:
    arrow = _needed("pyarrow", "an Arrow table")
    with arrow.memory_map(str(path)) as source:
        try:
            return arrow.ipc.open_file(source).read_all()
        except arrow.lib.ArrowInvalid:
            source.seek(0)
            return arrow.ipc.open_stream(source).read_all()


@reads("a data set that Hugging Face's datasets has saved")
def _saved(path: Path) -> Any:
    return _needed("datasets", "a saved data set").load_from_disk(str(path))


READERS: dict[str, Callable[[Path], Any]] = {
    ".csv": _csv,
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".feather": _arrow,
    ".json": leaf_file,
    ".sqlite": fedjax_file,
    ".txt": _lines,
}
