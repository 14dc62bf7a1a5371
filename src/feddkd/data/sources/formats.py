"""Readers of the official file formats.

Every file comes from outside: it may be cut short, the wrong file, or hostile. So a reader checks
the content against the expected shapes and values, runs nothing and writes nothing. Every error in
a reader becomes one `InputError` that names the file.
"""

import bz2
import functools
import gzip
import hashlib
import io
import pickle
import pickletools
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from feddkd.errors import InputError

Array = NDArray[Any]
Pair = tuple[Array, Array]  # images (N, C, H, W) of unsigned bytes, labels (N,)
Rows = list[tuple[str, int]]
P = ParamSpec("P")
R = TypeVar("R")

LARGEST = 8 << 30  # bytes; far more than any data set here, and the limit for compression bombs
LARGEST_ARCHIVE = 1 << 30
LARGEST_IMAGE = 1 << 16
CIFAR = (3, 32, 32)
USPS_PIXELS = 256


@dataclass(frozen=True)
class SourceFiles:
    """The files of one source, in the folders of its official release or in the data folder."""

    root: Path
    folders: tuple[str, ...]

    def find_or_none(self, *names: str) -> Path | None:
        """Return the first of these files that exists, or None."""
        paths = [self.root / folder / name for folder in (*self.folders, ".") for name in names]
        return next((path for path in paths if path.exists()), None)

    def find(self, *names: str) -> Path:
        """Return the first of these files that exists; raise an InputError if none does."""
        path = self.find_or_none(*names)
        if path is None:
            inside = " or ".join(f"{folder}/" for folder in self.folders)
            raise InputError(f"{' or '.join(names)} is not in {self.root} nor in its {inside}")
        return path


def reads(
    what: str,
) -> Callable[[Callable[Concatenate[Path, P], R]], Callable[Concatenate[Path, P], R]]:
    """Return a decorator that turns every error of a reader into one that names the file.

    It catches every Exception, because pickle, zlib, PIL, scipy and h5py raise almost any kind when
    a file is damaged.
    """

    def decorate(reader: Callable[Concatenate[Path, P], R]) -> Callable[Concatenate[Path, P], R]:
        @functools.wraps(reader)
        def guarded(path: Path, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return reader(path, *args, **kwargs)
            except InputError:
                raise
            except Exception as error:
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                raise InputError(f"{path} is missing, damaged or not {what}: {reason}") from error

        return guarded

    return decorate


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _content(path: Path, limit: int) -> bytes:
    """Return the content of a file, decompressed.

    The compression is read from the first bytes and not from the name, because browsers may
    decompress a file and keep its name.
    """
    with path.open("rb") as raw:
        start = raw.read(3)
        raw.seek(0)
        file: IO[bytes] | gzip.GzipFile | bz2.BZ2File = raw
        if start[:2] == b"\x1f\x8b":
            file = gzip.GzipFile(fileobj=raw)
        elif start == b"BZh":
            file = bz2.BZ2File(raw)
        content = file.read(limit + 1)
    _expect(len(content) <= limit, f"it holds more than {limit:,} bytes")
    return content


def _labels(values: Any, least: int, most: int) -> NDArray[np.int64]:
    labels = np.asarray(values)
    _expect(
        labels.ndim == 1 and len(labels) > 0 and labels.dtype.kind in "iuf",
        "the labels are not a list of numbers",
    )
    _expect(bool(((labels >= least) & (labels <= most)).all()), f"labels outside {least}..{most}")
    _expect(bool((labels == np.floor(labels)).all()), "labels that are not whole numbers")
    return labels.astype(np.int64)


@reads("the official idx file")
def idx(
    path: Path, shape: tuple[int, ...], md5: str = "", labels: tuple[int, int] | None = None
) -> Array:
    """Return the bytes of a file in LeCun's idx format, of exactly this shape, gzipped or not."""
    content = _content(path, 4 + 4 * len(shape) + int(np.prod(shape)))
    magic = bytes([0, 0, 8, len(shape)])
    _expect(content[:4] == magic, f"it begins with {content[:4].hex()}, not {magic.hex()}")
    actual = tuple(np.frombuffer(content, ">u4", len(shape), 4).tolist())
    _expect(actual == shape, f"its shape is {actual}, not {shape}")
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    _expect(md5 in ("", digest), f"md5 of the unpacked file is {digest}, not {md5}")
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)
    return values if labels is None else _labels(values, *labels)


@reads("the official binary CIFAR file")
def cifar_binary(path: Path, count: int, classes: int) -> Pair:
    """Return the images and labels of a binary file, whose rows are a label and pixels.

    CIFAR-100 has two labels in a row, first the coarse one; the last label is returned.
    """
    row = (2 if classes == 100 else 1) + 3072
    content = _content(path, count * row)
    _expect(len(content) == count * row, f"it holds {len(content):,} bytes, not {count * row:,}")
    rows = np.frombuffer(content, np.uint8).reshape(count, row)
    return rows[:, -3072:].reshape(count, *CIFAR), _labels(rows[:, -3073], 0, classes - 1)


class _PlainUnpickler(pickle.Unpickler):
    """A reader of pickles that allows only containers, numbers, text and numpy arrays."""

    allowed = frozenset(
        [(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")]
        + [("numpy", "ndarray"), ("numpy", "dtype")]
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no data file needs")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


@reads("the official pickled CIFAR file")
def cifar_pickle(path: Path, count: int, classes: int) -> Pair:
    """Return the images and labels of a pickled file.

    Python 2 wrote it, where text and bytes are the same type; the encoding latin-1 keeps both.
    """
    content = _content(path, 1 << 28)
    indices = [
        int(index or 0)
        for code, index, _ in pickletools.genops(content)
        if code.name.endswith("PUT")
    ]
    most = max(indices, default=0)
    # the unpickler would allocate memory for all of them at once
    _expect(most <= len(content), f"it stores {most:,} objects")
    batch = _PlainUnpickler(io.BytesIO(content), encoding="latin1").load()
    _expect(isinstance(batch, dict), "it is not a dictionary")
    batch = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
    data = batch["data"]
    _expect(
        isinstance(data, np.ndarray) and data.dtype == np.uint8, "its data are not unsigned bytes"
    )
    _expect(data.shape == (count, 3072), f"its data are of shape {data.shape}, not {(count, 3072)}")
    labels = _labels(batch["fine_labels" if classes == 100 else "labels"], 0, classes - 1)
    _expect(len(labels) == count, f"it has {len(labels)} labels for {count} images")
    return data.reshape(count, *CIFAR), labels


@reads("SVHN's cropped digits in MATLAB's format")
def svhn(path: Path, most: int) -> Pair:
    """Return the images and labels; the file has X (32, 32, 3, N), and y (N, 1) with 10 for 0.

    The shapes are checked before anything is decompressed.
    """
    from scipy.io import loadmat, whosmat

    content = _content(path, 1 << 30)
    _expect(content[:10] == b"MATLAB 5.0", "it is not a MATLAB 5.0 file")
    shapes = {name: (shape, kind) for name, shape, kind in whosmat(io.BytesIO(content))}
    (*image, count), kind = shapes["X"]
    _expect(
        image == [32, 32, 3] and kind == "uint8",
        f"X is {kind} of shape {shapes['X'][0]}, not uint8 (32, 32, 3, N)",
    )
    _expect(
        0 < count <= most and shapes["y"][0] == (count, 1),
        f"{count:,} images (at most {most:,}), labels {shapes['y'][0]}",
    )
    arrays = loadmat(io.BytesIO(content), variable_names=["X", "y"])
    return arrays["X"].transpose(3, 2, 0, 1), _labels(arrays["y"][:, 0], 1, 10) % 10


@reads("USPS in HDF5")
def usps_h5(path: Path, split: str, count: int) -> Pair:
    """Return the images and labels of one split of an HDF5 file."""
    try:
        import h5py
    except ImportError as error:
        raise InputError(
            f"{path} needs h5py: pip install 'feddkd[data]', or use usps.bz2 and usps.t.bz2"
        ) from error
    with h5py.File(path, "r") as file:
        data, target = file[split]["data"], file[split]["target"]
        _expect(
            data.shape == (count, USPS_PIXELS) and target.shape == (count,),
            f"{split} is of shape {data.shape}",
        )
        return _usps_bytes(data[:]), _labels(target[:], 0, 9)


@reads("USPS in libsvm's text format")
def usps_text(path: Path, count: int) -> Pair:
    """Return the images and labels; the file has pixels in -1..1 and labels 1..10 for 0..9."""
    from sklearn.datasets import load_svmlight_file

    x, y = load_svmlight_file(
        io.BytesIO(_content(path, 1 << 26)),
        n_features=USPS_PIXELS,
        dtype=np.float32,
        zero_based=False,
    )
    _expect(x.shape[0] == count, f"it holds {x.shape[0]:,} images, not {count:,}")
    return _usps_bytes((x.toarray() + 1) / 2), _labels(y, 1, 10) - 1


def _usps_bytes(x: Array) -> Array:
    """Return pixels in 0..1 as bytes, rounded down as in FedBN and torchvision."""
    x = np.asarray(x, np.float32)
    _expect(bool(((x >= 0) & (x <= 1)).all()), "pixels outside the range")
    return (x * np.float32(255)).astype(np.uint8).reshape(-1, 1, 16, 16)


@reads("a list of image names and labels")
def label_list(path: Path) -> Rows:
    """Return the names of images and their labels."""
    return _rows(_content(path, 1 << 24))


def _rows(text: bytes) -> Rows:
    pairs = [line.split() for line in text.decode("ascii").splitlines() if line.strip()]
    _expect(all(len(pair) == 2 for pair in pairs), "a line is not of the form: name label")
    _expect(
        all("/" not in name and "\\" not in name for name, _ in pairs),
        "a name points out of its folder",
    )
    labels = _labels([int(label) for _, label in pairs], 0, 9).tolist()
    return [(name, label) for (name, _), label in zip(pairs, labels, strict=True)]


@reads("MNIST-M's images")
def mnist_m(path: Path, split: str, most: int, labels: Path | None) -> Pair:
    """Return the images and labels of one split, from a folder or a tar file.

    If no list of labels is given, it must be in the tar file.
    """
    files = None if path.is_dir() else _members(path, f"mnist_m_{split}")
    rows = label_list(labels) if labels else _rows((files or {})[f"mnist_m_{split}_labels.txt"])
    _expect(
        len(rows) <= most, f"{len(rows):,} images are listed, the official release has {most:,}"
    )
    images = [
        _png(_image(path, name) if files is None else files[f"mnist_m_{split}/{name}"], name)
        for name, _ in rows
    ]
    return np.stack(images).transpose(0, 3, 1, 2), np.array([label for _, label in rows])


def _image(folder: Path, name: str) -> bytes:
    with (folder / name).open("rb") as file:
        return file.read(LARGEST_IMAGE)


def _members(path: Path, start: str) -> dict[str, bytes]:
    """Return a tar file's plain files by name; a name begins at the last `start` in the path.

    The files are read into memory: nothing is written, and no link is followed.
    """
    files: dict[str, bytes] = {}
    total = 0
    with tarfile.open(path) as archive:
        for member in archive:
            _, match, rest = member.name.rpartition(start)
            file = archive.extractfile(member) if match and member.isfile() else None
            if file:
                total += member.size
                _expect(
                    total <= LARGEST_ARCHIVE,
                    f"its images unpack to more than {LARGEST_ARCHIVE:,} bytes",
                )
                files[match + rest] = file.read()
    return files


def _png(content: bytes, name: str) -> Array:
    from PIL import Image

    with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
        _expect(image.size == (32, 32), f"{name} is of size {image.size}, not (32, 32)")
        return np.asarray(image.convert("RGB"))


@reads("an .npz file of arrays")
def npz(path: Path, names: tuple[str, ...]) -> list[Array]:
    """Return arrays by name; refuse pickled objects, because loading them would run code."""
    with zipfile.ZipFile(path) as archive:
        size = sum(member.file_size for member in archive.infolist())
    _expect(size <= LARGEST, f"it unpacks to {size:,} bytes; at most {LARGEST:,} are read")
    with np.load(path, allow_pickle=False) as arrays:
        _expect(
            set(names) <= set(arrays),
            f"it holds {', '.join(arrays) or 'nothing'}; it must hold {', '.join(names)}",
        )
        return [arrays[name] for name in names]
