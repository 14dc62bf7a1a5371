"""Files with examples by client: LEAF, FedJAX, folders of texts, images with masks."""

import json
import sqlite3
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feddkd.data.examples import Data
from feddkd.data.sources import SOURCES
from feddkd.data.sources.msgpack import unpack_map
from feddkd.errors import InputError


def load(text: str, root: Path) -> Data:
    return SOURCES.one(text).load(root)


def leaf(path: Path, users: dict[str, tuple[list[Any], list[Any]]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }
    path.write_text(json.dumps(content))


def test_leafs_folders_are_read_with_their_users(tmp_path: Path) -> None:
    leaf(tmp_path / "l/train/a.json", {"ann": ([[0.0, 1.0], [2.0, 3.0]], [0, 1])})
    leaf(tmp_path / "l/train/b.json", {"bob": ([[4.0, 5.0]], [1])})
    leaf(tmp_path / "l/test/a.json", {"ann": ([[6.0, 7.0]], [1]), "bob": ([[8.0, 9.0]], [0])})
    data = load("table(path='l', x='x', y='y', owner='user', standardise=False)", tmp_path)
    assert data.train.x.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert data.train.y.tolist() == [0, 1, 1]
    assert data.domains == ("ann", "bob")
    assert data.train.domain is not None
    assert data.test.domain is not None
    assert (data.train.domain.tolist(), data.test.domain.tolist()) == ([0, 0, 1], [0, 1])


def test_leafs_texts_become_characters(tmp_path: Path) -> None:
    leaf(tmp_path / "s.json", {"HAMLET": (["to b", "o be"] * 3, ["e", "."] * 3)})
    data = load("table(path='s.json', x='x', y='y', owner='user', length=4)", tmp_path)
    assert data.train.x.shape[1:] == (4,)
    assert data.labels == (".", "e")


def packed(value: Any) -> bytes:
    """Return msgpack of a value, with arrays in FedJAX's extension types."""
    if isinstance(value, int):
        return bytes([value]) if 0 <= value < 128 else b"\xd3" + struct.pack(">q", value)
    if isinstance(value, str):
        return bytes([0xA0 + len(value)]) + value.encode()
    if isinstance(value, bytes):
        return b"\xc6" + struct.pack(">I", len(value)) + value
    if isinstance(value, list | tuple):
        return b"\xdc" + struct.pack(">H", len(value)) + b"".join(map(packed, value))
    if isinstance(value, dict):
        parts = [packed(key) + packed(part) for key, part in value.items()]
        return bytes([0x80 + len(value)]) + b"".join(parts)
    if value.dtype == object:
        kind, content = 4, packed([list(value.shape), value.ravel().tolist()])
    else:
        kind, content = 1, packed([list(value.shape), value.dtype.name, value.tobytes()])
    return b"\xc9" + struct.pack(">I", len(content)) + bytes([kind]) + content


def fedjax(path: Path, clients: dict[bytes, dict[str, Any]]) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute(
            "CREATE TABLE federated_data (client_id BLOB NOT NULL PRIMARY KEY, data BLOB NOT NULL,"
            " num_examples INTEGER NOT NULL)"
        )
        for client, examples in clients.items():
            row = (client, zlib.compress(packed(examples)), len(next(iter(examples.values()))))
            connection.execute("INSERT INTO federated_data VALUES (?, ?, ?)", row)
    connection.close()


def test_fedjaxs_arrays_are_read_with_their_clients(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    clients = {
        name: {
            "pixels": rng.random((count, 4, 4), np.float32),
            "label": rng.integers(0, 3, count, np.int32),
        }
        for name, count in ((b"f1", 12), (b"f2", 9))
    }
    fedjax(tmp_path / "a.sqlite", clients)
    text = "table(path='a.sqlite', x='pixels', y='label', owner='client_id', test=0.3)"
    data = load(text, tmp_path)
    assert len(data.train) + len(data.test) == 21
    assert data.domains == ("f1", "f2")
    assert data.train.domain is not None
    for x, y, owner in zip(data.train.x, data.train.y, data.train.domain.tolist(), strict=True):
        examples = clients[b"f1" if owner == 0 else b"f2"]
        (at,) = np.flatnonzero((examples["pixels"] == x.numpy()).all((1, 2)))
        assert data.labels[int(y)] == str(examples["label"][at])


def test_fedjaxs_texts_are_read(tmp_path: Path) -> None:
    snippets = np.array([b"to be", b"or not"] * 3, object)
    fedjax(tmp_path / "a.sqlite", {b"HAMLET": {"snippets": snippets}})
    data = load("table(path='a.sqlite', x='snippets', owner='client_id', length=5)", tmp_path)
    assert "".join(data.labels) == " benort"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x81\xa1x", "cut short"),
        (b"\x01", "no map"),
        (b"\xc1", "does not use"),
        (b"\x91" * 40, "deeply"),
        (b"\x81\xa1x\xc7\x01\x07\x00", "extension type 7"),
        (b"", "cut short"),
    ],
)
def test_damaged_msgpack_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        unpack_map(content)


def test_files_that_are_not_of_the_format_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.sqlite").write_bytes(b"SQLite format 3\x00 no")
    (tmp_path / "a.json").write_text('{"users": ["ann"]}')
    for name in ("a.sqlite", "a.json", "absent.sqlite"):
        with pytest.raises(InputError, match=name.replace(".", r"\.")):
            load(f"table(path='{name}', y='y')", tmp_path)


def test_each_text_of_a_folder_is_a_client(tmp_path: Path) -> None:
    for name in ("ann", "bob"):
        (tmp_path / f"{name}.txt").write_text(f"{name} says hello\n\nand goodbye\n" * 4)
    data = load(f"table(path='{tmp_path}', x='text', owner='file', length=12)", tmp_path)
    assert data.domains == ("ann", "bob")
    assert "".join(data.labels) == " abdeghlnosy"


def test_arrays_in_a_file_may_have_owners(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {
        "x_train": np.arange(12.0).reshape(6, 2),
        "y_train": np.arange(6) % 2,
        "owner_train": np.array([7, 9, 7, 9, 7, 9]),
        "x_test": np.zeros((2, 2)),
        "y_test": np.array([0, 1]),
        "owner_test": np.array([9, 7]),
    }
    np.savez(tmp_path / "a.npz", **arrays)
    data = load("npz(path='a.npz')", tmp_path)
    assert data.domains == ("7", "9")
    assert data.train.domain is not None
    assert data.test.domain is not None
    assert (data.train.domain.tolist(), data.test.domain.tolist()) == ([0, 1] * 3, [1, 0])
    np.savez(tmp_path / "b.npz", **{**arrays, "owner_test": np.array([9])})
    with pytest.raises(InputError, match="2 examples need 2 owners"):
        load("npz(path='b.npz')", tmp_path)


def test_the_owner_of_a_row_is_another_word_for_its_domain(tmp_path: Path) -> None:
    rows = "".join(f"{n},{'xy'[n % 2]},{'AB'[n // 20]}\n" for n in range(40))
    (tmp_path / "a.csv").write_text(f"a,label,who\n{rows}")
    one, other = (
        load(f"csv(path='a.csv', {word}='who')", tmp_path) for word in ("owner", "domain")
    )
    assert one.digest == other.digest
    assert one.domains == ("A", "B")
    with pytest.raises(InputError, match="one of them"):
        load("csv(path='a.csv', owner='who', domain='who')", tmp_path)


def draw_masks(folder: Path, owners: list[str]) -> None:
    image = pytest.importorskip("PIL.Image")
    for number, owner in enumerate(owners):
        pixels = np.zeros((8, 8, 3), np.uint8)
        pixels[:, 4:] = 200
        mask = (pixels[:, :, 0] > 0).astype(np.uint8)
        mask[0] = 255
        for name, array in (("images", pixels), ("masks", mask)):
            path = folder / name / owner / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.fromarray(array).save(path)


def test_images_and_masks_are_read_together(tmp_path: Path) -> None:
    draw_masks(tmp_path / "m", ["ann", "bob"] * 5)
    data = load("masks(path='m', side=8)", tmp_path)
    assert data.train.x.shape[1:] == (3, 8, 8)
    assert data.labels == ("0", "1")
    assert data.domains == ("ann", "bob")
    assert data.train.y[0, 0].tolist() == [255] * 8
    assert data.train.y[0, 1:].unique().tolist() == [0, 1]
    assert ((data.train.x[:, 0] > 0) == (data.train.y == 1))[:, 1:].all()


def test_an_image_without_a_mask_is_named(tmp_path: Path) -> None:
    draw_masks(tmp_path / "m", ["ann"] * 3)
    (tmp_path / "m/masks/ann/1.png").unlink()
    with pytest.raises(InputError, match="ann/1 is in one of them only"):
        load("masks(path='m')", tmp_path)


def test_leafs_femnist_has_images_and_62_names(tmp_path: Path) -> None:
    image = [round(n / 784, 4) for n in range(784)]
    leaf(tmp_path / "leaf_femnist/train/a.json", {"f1": ([image, image], [0, 61])})
    leaf(tmp_path / "leaf_femnist/test/a.json", {"f1": ([image], [10])})
    data = load("leaf_femnist", tmp_path)
    assert data.train.x.shape == (2, 1, 28, 28)
    assert data.train.x[0, 0, 1, 0].item() == pytest.approx(28 / 784, abs=1e-4)
    assert (data.labels[61], data.labels[10], data.classes) == ("z", "A", 62)


def test_ag_news_has_characters_and_topics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = '"3","Shares rise","Oil, too."\n"1","Talks","go on"\n'
    for name, times in (("train", 60_000), ("test", 3_800)):
        (tmp_path / f"{name}.csv").write_text(lines * times)
    data = load("ag_news(length=8)", tmp_path)
    assert set(data.labels) == {"Business", "World"}
    characters = data.note.removeprefix("characters: padding and ").strip("'")
    texts = {"".join(characters[n - 1] for n in row) for row in data.train.x[:4].tolist()}
    assert texts == {"Shares r", "Talks go"}
    assert len(data.test) == 7_600
