"""Files that hold examples by client, read as tables: LEAF's JSON and FedJAX's SQLite.

Their tables have the columns of the file and one of owners: `user` in LEAF's, `client_id` in
FedJAX's.
"""

import json
import sqlite3
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from feddkd.data.sources.file_reading import expect, reads
from feddkd.data.sources.msgpack import unpack_map

LARGEST = 2 << 30  # bytes of one client's examples; far more than any real client has


@reads("LEAF's JSON, with users and user_data")
def leaf_file(path: Path) -> dict[str, list[Any]]:
    """Return one file of LEAF's as a table with the columns x, y and user."""
    content = json.loads(path.read_text(encoding="utf-8"))
    table: dict[str, list[Any]] = {"x": [], "y": [], "user": []}
    for user in content["users"]:
        x, y = (content["user_data"][user][name] for name in ("x", "y"))
        expect(len(x) == len(y), f"user {user!r} has {len(x)} examples and {len(y)} labels")
        for name, values in (("x", x), ("y", y), ("user", [user] * len(y))):
            table[name].extend(values)
    return table


def leaf_files(folder: Path) -> dict[str, list[Any]]:
    """Return all files of one of LEAF's folders, such as `train`, as one table."""
    tables = [leaf_file(path) for path in sorted(folder.glob("*.json"))]
    return {name: [v for table in tables for v in table[name]] for name in ("x", "y", "user")}


def is_leaf_folder(path: Path) -> bool:
    """Return whether a folder has LEAF's folders `train` and `test` with JSON files."""
    return all(any((path / part).glob("*.json")) for part in ("train", "test"))


@reads("FedJAX's SQLite, with a table federated_data")
def fedjax_file(path: Path) -> dict[str, list[Any]]:
    """Return a file of FedJAX's as a table with the columns of its clients and client_id."""
    expect(path.is_file(), "there is no such file")
    table: dict[str, list[Any]] = {}
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        rows = connection.execute("SELECT client_id, data FROM federated_data ORDER BY rowid")
        for client, data in rows:
            unpacker = zlib.decompressobj()
            examples = unpack_map(unpacker.decompress(data, LARGEST))
            expect(not unpacker.unconsumed_tail, "a client has too many bytes")
            count = {len(values) for values in examples.values()}
            expect(len(count) == 1, f"the columns of client {client!r} differ in length")
            examples["client_id"] = [_text(client)] * count.pop()
            for name, values in examples.items():
                table.setdefault(name, []).extend(map(_value, values))
    return table


def _value(value: Any) -> Any:
    """Return a number, an array or a text as the columns of tables have them."""
    if isinstance(value, bytes):
        return _text(value)
    return value.item() if isinstance(value, np.generic) else value


def _text(given: Any) -> str:
    return given.decode("latin-1") if isinstance(given, bytes) else str(given)
