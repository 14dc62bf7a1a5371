"""Downloads of official files, with checksums.

The checksums are those that torchvision and torchtext give for the same files.
"""

import hashlib
import os
import tarfile
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from feddkd.data.sources.file_reading import expect
from feddkd.data.sources.registry import SOURCES
from feddkd.errors import InputError, unknown

SECONDS = 30.0  # without an answer
LARGEST = 1 << 30  # bytes of a file
PIECE = 1 << 20


@dataclass(frozen=True)
class RemoteFile:
    """A file of an official release."""

    name: str
    md5: str
    places: tuple[str, ...]  # folders on the network that have it, the first one first
    members: tuple[str, ...] = ()  # of an archive, which are unpacked


def _files(places: tuple[str, ...], sums: dict[str, str]) -> tuple[RemoteFile, ...]:
    return tuple(RemoteFile(name, md5, places) for name, md5 in sums.items())


def _cifar(name: str, md5: str, parts: Sequence[str]) -> tuple[RemoteFile, ...]:
    return (RemoteFile(name, md5, ("https://www.cs.toronto.edu/~kriz/",), tuple(parts)),)


TEN = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
LETTERS = tuple(
    f"emnist-letters-{part}-{kind}-ubyte.gz"
    for part in ("train", "test")
    for kind in ("images-idx3", "labels-idx1")
)
# source -> the folder below the data folder, and the files
DOWNLOADS: dict[str, tuple[str, tuple[RemoteFile, ...]]] = {
    "mnist": (
        "mnist",
        _files(
            ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
            {
                "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
                "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
                "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
            },
        ),
    ),
    "fashion_mnist": (
        "fashion_mnist",
        _files(
            ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
            {
                "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
                "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
                "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
            },
        ),
    ),
    "emnist": (
        "emnist-letters",
        (
            RemoteFile(
                "gzip.zip",
                "58c8d27c78d21e728a6bc7b3cc06412e",
                (
                    "https://biometrics.nist.gov/cs_links/EMNIST/",
                    "https://www.itl.nist.gov/iaui/vip/cs_links/EMNIST/",
                ),
                LETTERS,
            ),
        ),
    ),
    "cifar10": (
        "cifar-10-batches-py",
        _cifar("cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", TEN),
    ),
    "cifar100": (
        "cifar-100-python",
        _cifar("cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85", ("train", "test")),
    ),
    "svhn": (
        "svhn",
        _files(
            ("http://ufldl.stanford.edu/housenumbers/",),
            {
                "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
                "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
            },
        ),
    ),
    "usps": (
        "usps",
        _files(
            ("https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/",),
            {
                "usps.bz2": "ec16c51db3855ca6c91edd34d0e9b197",
                "usps.t.bz2": "8ea070ee2aca1ac39742fdd1ef5ed118",
            },
        ),
    ),
    "ag_news": (
        "ag_news",
        _files(
            ("https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/",),
            {
                "train.csv": "b1a00f826fdfbd249f79597b59e1dc12",
                "test.csv": "d52ea96a97a2d943681189a97654912d",
            },
        ),
    ),
}


def download(name: str, root: Path, mirrors: Sequence[str] = ()) -> Iterator[str]:
    """Download the files of a source below a folder; yield a line about each.

    `mirrors` are addresses of folders that are asked first. A file that is there already stays.
    """
    folder, files = _of_source(name)
    for file in files:
        target = root / folder
        wanted = [target / member for member in file.members] or [target / file.name]
        if all(path.exists() for path in wanted):
            yield f"{file.name}: is in {target} already"
            continue
        places = [*(f"{mirror.rstrip('/')}/" for mirror in mirrors), *file.places]
        archive = _first(file, places, target, by_hand=f"put it into {target}")
        if file.members:
            _unpack(archive, file.members)
        yield f"{file.name}: in {target}"


def _of_source(name: str) -> tuple[str, tuple[RemoteFile, ...]]:
    """Return the folder and the files of a source, or raise InputError if it has none."""
    if name in DOWNLOADS:
        return DOWNLOADS[name]
    if name not in SOURCES:
        raise unknown(f"unknown data source {name!r}", name, DOWNLOADS, "downloads exist for")
    source = SOURCES[name]() if ... not in SOURCES.options(name).values() else None
    if source is None or not source.files:
        raise InputError(f"data source {name!r} needs no download")
    raise InputError(
        f"there is no download for data source {name!r}: get {', '.join(source.files)} by hand from"
        f" {source.origin}; `feddkd data list` says where they go"
    )


def _first(file: RemoteFile, places: Sequence[str], target: Path, by_hand: str) -> Path:
    """Download a file from the first place that has it, and return its path."""
    failed = []
    for place in places:
        try:
            return _fetch(f"{place}{file.name}", file.md5, target / file.name)
        except (OSError, ValueError) as error:
            failed.append(f"{place}{file.name}: {' '.join(str(error).split())}")
    raise InputError(
        f"cannot download {file.name} ({'; '.join(failed)}); get it by hand and {by_hand}: its md5"
        f" is {file.md5}"
    )


def _fetch(address: str, md5: str, path: Path) -> Path:
    """Download a file in full or not at all; raise a ValueError if its checksum is wrong."""
    expect(address.startswith(("http://", "https://")), "the address must be of http or https")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with (
            urllib.request.urlopen(address, timeout=SECONDS) as reply,
            unfinished.open("wb") as file,
        ):
            digest = _copy(reply, file)
        expect(digest == md5, f"its md5 is {digest}, not {md5}")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _copy(reply: IO[bytes], file: IO[bytes]) -> str:
    """Copy a reply into a file and return its md5."""
    digest, size = hashlib.md5(usedforsecurity=False), 0
    while piece := reply.read(PIECE):
        size += len(piece)
        expect(size <= LARGEST, f"it holds more than {LARGEST:,} bytes")
        digest.update(piece)
        file.write(piece)
    return digest.hexdigest()


def _unpack(archive: Path, members: Sequence[str]) -> None:
    """Write the members of an archive beside it, by their last names, and remove the archive."""
    opened: Callable[[str], IO[bytes] | None]
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            names, opened = packed.namelist(), packed.open
            _write_members(archive.parent, names, members, opened)
    else:
        with tarfile.open(archive) as packed_tar:
            names, opened = packed_tar.getnames(), packed_tar.extractfile
            _write_members(archive.parent, names, members, opened)
    archive.unlink()


def _write_members(
    folder: Path,
    names: Sequence[str],
    members: Sequence[str],
    opened: Callable[[str], IO[bytes] | None],
) -> None:
    by_last_name = {name.rpartition("/")[2]: name for name in names}
    for member in members:
        content = opened(by_last_name[member]) if member in by_last_name else None
        if content is None:
            raise InputError(f"the archive in {folder} has no file {member}")
        with content:
            unfinished = folder / f".{member}.{os.getpid()}"
            unfinished.write_bytes(content.read())
            unfinished.replace(folder / member)
