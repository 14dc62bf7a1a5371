"""Downloads: from a server on loopback, with checksums, mirrors and files that are missing."""

import hashlib
import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from commandline import Feddkd
from feddkd.data.sources import SOURCES, downloads
from feddkd.data.sources.downloads import DOWNLOADS, RemoteFile, download
from feddkd.errors import InputError


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    folder = tmp_path / "served"
    folder.mkdir()
    handler = partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}/", folder
        http.shutdown()
        thread.join()


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def offer(monkeypatch: pytest.MonkeyPatch, *files: RemoteFile) -> None:
    monkeypatch.setitem(DOWNLOADS, "mnist", ("mnist", files))


def test_a_file_is_downloaded_once(
    server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, folder = server
    (folder / "a.gz").write_bytes(b"content")
    offer(monkeypatch, RemoteFile("a.gz", md5(b"content"), (address,)))
    assert list(download("mnist", tmp_path)) == [f"a.gz: in {tmp_path / 'mnist'}"]
    assert (tmp_path / "mnist/a.gz").read_bytes() == b"content"
    (folder / "a.gz").unlink()
    assert "already" in next(download("mnist", tmp_path))
    assert [path.name for path in (tmp_path / "mnist").iterdir()] == ["a.gz"]


def test_the_next_place_is_asked_if_one_fails_or_has_another_file(
    server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, folder = server
    for place, content in (("wrong", b"other"), ("right", b"content")):
        (folder / place).mkdir()
        (folder / place / "a.gz").write_bytes(content)
    places = tuple(f"{address}{place}/" for place in ("absent", "wrong", "right"))
    offer(monkeypatch, RemoteFile("a.gz", md5(b"content"), places))
    list(download("mnist", tmp_path))
    assert (tmp_path / "mnist/a.gz").read_bytes() == b"content"


def test_a_wrong_checksum_leaves_no_file_and_says_how_to_go_on(
    server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, folder = server
    (folder / "a.gz").write_bytes(b"other")
    offer(monkeypatch, RemoteFile("a.gz", md5(b"content"), (address,)))
    with pytest.raises(InputError, match=rf"{md5(b'other')}.*by hand.*{tmp_path}") as caught:
        list(download("mnist", tmp_path))
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "mnist").iterdir()) == []


def test_the_wanted_members_of_an_archive_are_unpacked(
    server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, folder = server
    with zipfile.ZipFile(folder / "a.zip", "w") as packed:
        packed.writestr("gzip/one", "1")
        packed.writestr("../evil", "2")
    with tarfile.open(folder / "b.tar.gz", "w:gz") as packed_tar:
        entry = tarfile.TarInfo("batches/two")
        entry.size = 1
        packed_tar.addfile(entry, io.BytesIO(b"2"))
    sums = {name: md5((folder / name).read_bytes()) for name in ("a.zip", "b.tar.gz")}
    offer(
        monkeypatch,
        RemoteFile("a.zip", sums["a.zip"], (address,), ("one",)),
        RemoteFile("b.tar.gz", sums["b.tar.gz"], (address,), ("two",)),
    )
    list(download("mnist", tmp_path))
    found = {path.name: path.read_text() for path in (tmp_path / "mnist").iterdir()}
    assert found == {"one": "1", "two": "2"}


def test_a_reply_without_end_is_cut(
    server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, folder = server
    (folder / "a.gz").write_bytes(b"x" * 100)
    monkeypatch.setattr(downloads, "LARGEST", 50)
    offer(monkeypatch, RemoteFile("a.gz", md5(b"x" * 100), (address,)))
    with pytest.raises(InputError, match="more than 50 bytes"):
        list(download("mnist", tmp_path))


def test_the_command_asks_a_mirror_first(
    server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, feddkd: Feddkd
) -> None:
    address, folder = server
    (folder / "a.gz").write_bytes(b"content")
    offer(monkeypatch, RemoteFile("a.gz", md5(b"content"), ("http://127.0.0.1:9/",)))
    done = feddkd("data", "get", "mnist", "--data", str(tmp_path), "--mirror", address)
    assert done.status == 0
    assert "a.gz" in done.out
    assert (tmp_path / "mnist/a.gz").exists()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mnits", "mnist"),
        ("digits", "needs no download"),
        ("csv", "needs no download"),
        ("leaf_femnist", "by hand from https://github.com/"),
        ("mnist_m", "by hand from http"),
    ],
)
def test_a_source_without_a_download_says_so(name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=says):
        list(download(name, tmp_path))


def test_every_download_goes_where_its_source_looks() -> None:
    for name, (folder, files) in DOWNLOADS.items():
        with pytest.raises(InputError) as caught:
            SOURCES.one(name).load(Path("no such folder"))
        assert name in str(caught.value)
        assert files
        assert folder in folders_of(name)
        assert all(len(file.md5) == 32 for file in files)


def folders_of(name: str) -> tuple[str, ...]:
    """Return the folders in which the reader of a source looks for files."""
    load: Any = SOURCES.one(name).load
    cells = zip(load.__code__.co_freevars, load.__closure__, strict=True)
    folders: tuple[str, ...] = dict(cells)["folders"].cell_contents
    return folders
