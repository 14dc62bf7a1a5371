"""Readers of MNIST-M: PNG images in a folder or a tar file, and a list of their labels."""

import io
import tarfile
from pathlib import Path

import numpy as np

from feddkd.data.sources.file_reading import (
    Array,
    Pair,
    checked_labels,
    expect,
    read_content,
    reads,
)

Rows = list[tuple[str, int]]

LARGEST_ARCHIVE = 1 << 30  # bytes
LARGEST_IMAGE = 1 << 16


@reads("a list of image names and labels")
def label_list(path: Path) -> Rows:
    """Return the names of images and their labels."""
    return _rows(read_content(path, 1 << 24))


def _rows(text: bytes) -> Rows:
    pairs = [line.split() for line in text.decode("ascii").splitlines() if line.strip()]
    expect(all(len(pair) == 2 for pair in pairs), "a line is not of the form: name label")
    expect(
        all("/" not in name and "\\" not in name for name, _ in pairs),
        "a name points out of its folder",
    )
    labels = checked_labels([int(label) for _, label in pairs], 0, 9).tolist()
    return [(name, label) for (name, _), label in zip(pairs, labels, strict=True)]


@reads("MNIST-M's images")
def mnist_m(path: Path, split: str, most: int, labels: Path | None) -> Pair:
    """Return the images and labels of one split, from a folder or a tar file.

    If no list of labels is given, it must be in the tar file.
    """
    files = None if path.is_dir() else _members(path, f"mnist_m_{split}")
    rows = label_list(labels) if labels else _rows((files or {})[f"mnist_m_{split}_labels.txt"])
    expect(len(rows) <= most, f"{len(rows):,} images are listed, the official release has {most:,}")
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
                expect(
                    total <= LARGEST_ARCHIVE,
                    f"its images unpack to more than {LARGEST_ARCHIVE:,} bytes",
                )
                files[match + rest] = file.read()
    return files


def _png(content: bytes, name: str) -> Array:
    from PIL import Image

    with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
        expect(image.size == (32, 32), f"{name} is of size {image.size}, not (32, 32)")
        return np.asarray(image.convert("RGB"))
