"""Readers of the official file formats; how they read with checks is in `file_reading`."""

import hashlib
import io
import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from feddkd.data.sources.file_reading import (
    Array,
    Pair,
    checked_labels,
    expect,
    read_content,
    reads,
)
from feddkd.errors import InputError

LARGEST = 8 << 30  # bytes; far more than any data set here, and the limit for compression bombs
CIFAR = (3, 32, 32)
USPS_PIXELS = 256


@reads("the official idx file")
def idx(
    path: Path, shape: tuple[int, ...], md5: str = "", labels: tuple[int, int] | None = None
) -> Array:
    """Return the bytes of a file in LeCun's idx format, of exactly this shape, gzipped or not."""
    content = read_content(path, 4 + 4 * len(shape) + int(np.prod(shape)))
    magic = bytes([0, 0, 8, len(shape)])
    expect(content[:4] == magic, f"it begins with {content[:4].hex()}, not {magic.hex()}")
    actual = tuple(np.frombuffer(content, ">u4", len(shape), 4).tolist())
    expect(actual == shape, f"its shape is {actual}, not {shape}")
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    expect(md5 in ("", digest), f"md5 of the unpacked file is {digest}, not {md5}")
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)
    return values if labels is None else checked_labels(values, *labels)


@reads("the official binary CIFAR file")
def cifar_binary(path: Path, count: int, classes: int) -> Pair:
    """Return the images and labels of a binary file, whose rows are a label and pixels.

    CIFAR-100 has two labels in a row, first the coarse one; the last label is returned.
    """
    row = (2 if classes == 100 else 1) + 3072
    content = read_content(path, count * row)
    expect(len(content) == count * row, f"it holds {len(content):,} bytes, not {count * row:,}")
    rows = np.frombuffer(content, np.uint8).reshape(count, row)
    return rows[:, -3072:].reshape(count, *CIFAR), checked_labels(rows[:, -3073], 0, classes - 1)


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
    content = read_content(path, 1 << 28)
    indices = [
        int(index or 0)
        for code, index, _ in pickletools.genops(content)
        if code.name.endswith("PUT")
    ]
    most = max(indices, default=0)
    # the unpickler would allocate memory for all of them at once
    expect(most <= len(content), f"it stores {most:,} objects")
    batch = _PlainUnpickler(io.BytesIO(content), encoding="latin1").load()
    expect(isinstance(batch, dict), "it is not a dictionary")
    batch = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
    data = batch["data"]
    expect(
        isinstance(data, np.ndarray) and data.dtype == np.uint8, "its data are not unsigned bytes"
    )
    expect(data.shape == (count, 3072), f"its data are of shape {data.shape}, not {(count, 3072)}")
    labels = checked_labels(batch["fine_labels" if classes == 100 else "labels"], 0, classes - 1)
    expect(len(labels) == count, f"it has {len(labels)} labels for {count} images")
    return data.reshape(count, *CIFAR), labels


@reads("SVHN's cropped digits in MATLAB's format")
def svhn(path: Path, most: int) -> Pair:
    """Return the images and labels; the file has X (32, 32, 3, N), and y (N, 1) with 10 for 0.

    The shapes are checked before anything is decompressed.
    """
    from scipy.io import loadmat, whosmat

    content = read_content(path, 1 << 30)
    expect(content[:10] == b"MATLAB 5.0", "it is not a MATLAB 5.0 file")
    shapes = {name: (shape, kind) for name, shape, kind in whosmat(io.BytesIO(content))}
    (*image, count), kind = shapes["X"]
    expect(
        image == [32, 32, 3] and kind == "uint8",
        f"X is {kind} of shape {shapes['X'][0]}, not uint8 (32, 32, 3, N)",
    )
    expect(
        0 < count <= most and shapes["y"][0] == (count, 1),
        f"{count:,} images (at most {most:,}), labels {shapes['y'][0]}",
    )
    arrays = loadmat(io.BytesIO(content), variable_names=["X", "y"])
    return arrays["X"].transpose(3, 2, 0, 1), checked_labels(arrays["y"][:, 0], 1, 10) % 10


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
        expect(
            data.shape == (count, USPS_PIXELS) and target.shape == (count,),
            f"{split} is of shape {data.shape}",
        )
        return _usps_bytes(data[:]), checked_labels(target[:], 0, 9)


@reads("USPS in libsvm's text format")
def usps_text(path: Path, count: int) -> Pair:
    """Return the images and labels; the file has pixels in -1..1 and labels 1..10 for 0..9."""
    from sklearn.datasets import load_svmlight_file

    x, y = load_svmlight_file(
        io.BytesIO(read_content(path, 1 << 26)),
        n_features=USPS_PIXELS,
        dtype=np.float32,
        zero_based=False,
    )
    expect(x.shape[0] == count, f"it holds {x.shape[0]:,} images, not {count:,}")
    return _usps_bytes((x.toarray() + 1) / 2), checked_labels(y, 1, 10) - 1


def _usps_bytes(x: Array) -> Array:
    """Return pixels in 0..1 as bytes, rounded down as in FedBN and torchvision."""
    x = np.asarray(x, np.float32)
    expect(bool(((x >= 0) & (x <= 1)).all()), "pixels outside the range")
    return (x * np.float32(255)).astype(np.uint8).reshape(-1, 1, 16, 16)


@reads("an .npz file of arrays")
def npz(path: Path, names: tuple[str, ...], more: tuple[str, ...] = ()) -> list[Array]:
    """Return arrays by name, and those in `more` if all are there.

    Pickled objects are refused, because loading them would run code.
    """
    with zipfile.ZipFile(path) as archive:
        size = sum(member.file_size for member in archive.infolist())
    expect(size <= LARGEST, f"it unpacks to {size:,} bytes; at most {LARGEST:,} are read")
    with np.load(path, allow_pickle=False) as arrays:
        expect(
            set(names) <= set(arrays),
            f"it holds {', '.join(arrays) or 'nothing'}; it must hold {', '.join(names)}",
        )
        wanted = (*names, *more) if set(more) <= set(arrays) else names
        return [arrays[name] for name in wanted]
