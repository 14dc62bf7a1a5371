"""A user's own images, from folders: one for each class, or images with masks."""

from pathlib import Path
from typing import Annotated

import numpy as np
import torch

from feddkd.data.batches import Indices
from feddkd.data.examples import Data, Examples, from_arrays
from feddkd.data.sources.file_reading import Array, reads
from feddkd.data.sources.own_files import Part, find_path
from feddkd.data.sources.registry import SOURCES, Source
from feddkd.data.tables import numbered, split_rows
from feddkd.errors import InputError, choices
from feddkd.spec.types import Bound

Side = Annotated[int, Bound(least=1, most=1024)]  # pixels; a larger number is a mistake
IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
IGNORED_PIXEL = 255


@SOURCES.register
def folder(path: str, side: Side = 32, colour: bool = True, test: Part = 0.2) -> Source:
    """Your own images: a folder with a folder of images for each class.

    The folders of the classes may also be in train/ and test/. Without train/ and test/, a share
    `test` of every class is the test set. Images are resized to `side` x `side` pixels, in colour
    or grey.
    """

    def load(root: Path | None) -> Data:
        base = find_path(root, path)
        if all((base / part).is_dir() for part in ("train", "test")):
            parts = [_pictures(base / part, side, colour) for part in ("train", "test")]
            y, labels = numbered([*parts[0][1], *parts[1][1]])
            x = np.concatenate([x for x, _ in parts])
            trained, tested = np.split(np.arange(len(y)), [len(parts[0][1])])
        else:
            x, words = _pictures(base, side, colour)
            y, labels = numbered(words)
            tested, trained = split_rows(y, test)
        train = x[trained], y[trained]
        return from_arrays(train, (x[tested], y[tested]), name=base.resolve().name, labels=labels)

    summary = "your own images: a folder with a folder for each class"
    return Source(load, (path,), "your own images", "normalise(mean=0.5, std=0.5)", summary)


@SOURCES.register
def masks(path: str, side: Side = 64, colour: bool = True, test: Part = 0.2) -> Source:
    """Your own images with masks, for the task `segmentation`.

    `images/` and `masks/` have files of equal names; the value of a mask's pixel is its class, and
    255 is none. Folders inside both, such as images/clinic1/, are owners of the images:
    partition = "owners()" makes a client of each. A share `test` of every owner is the test set.
    """

    def load(root: Path | None) -> Data:
        base = find_path(root, path)
        x, y, words = _segmented(base, side, colour)
        owners, names = numbered(words)
        tested, trained = split_rows(owners, test)
        known = y[y != IGNORED_PIXEL]
        classes = int(known.max()) + 1 if len(known) else 0

        def part(rows: Indices) -> Examples:
            of = torch.from_numpy(owners[rows]) if len(names) > 1 else None
            return Examples(torch.from_numpy(x[rows]), torch.from_numpy(y[rows]), of)

        return from_arrays(
            part(trained),
            part(tested),
            name=base.resolve().name,
            labels=tuple(map(str, range(classes))),
            domains=names if len(names) > 1 else (),
            class_labels=False,
        )

    summary = "your own images with masks: folders images/ and masks/"
    return Source(load, (path,), "your own images", "normalise(mean=0.5, std=0.5)", summary)


@reads("a folder of images, one folder for each class")
def _pictures(path: Path, side: int, colour: bool) -> tuple[Array, list[str]]:
    files = sorted(file for file in path.glob("*/*") if file.suffix.lower() in IMAGES)
    if not files:
        raise InputError(
            f"{path} has no folders with images; each class must be a folder, and the names of"
            f" images must end in one of {choices(IMAGES)}"
        )
    images = np.stack([picture(file, side, colour) for file in files])
    return images, [file.parent.name for file in files]


@reads("images/ and masks/, folders with files of equal names")
def _segmented(path: Path, side: int, colour: bool) -> tuple[Array, Array, list[str]]:
    """Return images, masks, and the folder of each image."""
    files = {name: _images_below(path / name) for name in ("images", "masks")}
    if not files["images"] or files["images"].keys() != files["masks"].keys():
        alone = sorted(files["images"].keys() ^ files["masks"].keys())
        problem = f"{alone[0]} is in one of them only" if alone else "there are no images"
        raise InputError(f"{path} must have images/ and masks/ with equal names: {problem}")
    pairs = [(file, files["masks"][name]) for name, file in files["images"].items()]
    x = np.stack([picture(file, side, colour) for file, _ in pairs])
    y = np.stack([_mask(file, side) for _, file in pairs])
    return x, y, [str(Path(name).parent) for name in files["images"]]


def _images_below(path: Path) -> dict[str, Path]:
    """Return the images in a folder and its folders, by their names without their endings."""
    found = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMAGES)
    return {str(file.relative_to(path).with_suffix("")): file for file in found}


@reads("a mask")
def _mask(path: Path, side: int) -> Array:
    """Return a mask as whole numbers, resized without mixing classes."""
    from PIL import Image

    with Image.open(path) as image:
        if image.mode not in ("L", "P", "1"):
            raise InputError(f"{path} is no mask: its pixels are {image.mode}, not one number each")
        whole = np.asarray(image.resize((side, side), Image.Resampling.NEAREST))
    return whole.astype(np.int64)


@reads("an image")
def picture(path: Path, side: int, colour: bool) -> Array:
    """Return an image, resized to a square, as (channels, side, side)."""
    from PIL import Image

    with Image.open(path) as image:
        pixels = np.asarray(
            image.convert("RGB" if colour else "L").resize((side, side), Image.Resampling.BILINEAR)
        )
    return pixels.reshape(side, side, -1).transpose(2, 0, 1)
