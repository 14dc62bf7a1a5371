"""Published data sets.

Files are read from the user's data folder, with the names and folders of their official releases;
`feddkd data get` downloads them. Pixels are stored as the published whole numbers; the transform
changes them when they are read.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np

from feddkd.data.examples import Data, from_arrays
from feddkd.data.sources import formats
from feddkd.data.sources.downloads import DOWNLOADS
from feddkd.data.sources.file_reading import Pair, SourceFiles
from feddkd.data.sources.mnist_m import mnist_m as read_mnist_m
from feddkd.data.sources.registry import DIGITS, SOURCES
from feddkd.data.sources.registry import Source as Source
from feddkd.errors import InputError
from feddkd.randomness import generator
from feddkd.spec.types import LATER, Bound

LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
FASHION = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
CIFAR100 = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
    camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile
    cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp
    lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom
    oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
    possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake
    spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor
    train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
FEDMA_MEAN, FEDMA_STD = (  # FedMA gives grey levels; nine digits keep every bit of float32
    ",".join(f"{level / 255:.9g}" for level in levels)
    for levels in ((125.3, 123.0, 113.9), (63.0, 62.1, 66.7))
)
FEDMA = f"crop(padding=4) | flip() | normalise(mean='{FEDMA_MEAN}', std='{FEDMA_STD}')"
FEDMAX = "pad(pixels=2) | normalise(mean=0.1307, std=0.3081)"
FEDBN = "normalise(mean=0.5, std=0.5)"


def from_files(
    name: str,
    read: Callable[[SourceFiles], Data],
    folders: tuple[str, ...],
    files: tuple[str, ...],
    origin: str,
    transform: str,
    summary: str,
) -> Source:
    """Return a source that reads files. Every error about them says where to get them."""

    command = f"; `feddkd data get {name} --data DIR` downloads them" if name in DOWNLOADS else ""

    def load(root: Path | None) -> Data:
        if root is None or not root.is_dir():
            problem = "no data folder is given" if root is None else f"there is no folder {root}"
            raise InputError(
                f"data source {name!r}: {problem}; give it with --data DIR or FEDDKD_DATA; it must"
                f" contain {folders[0]}/ with {', '.join(files)}, from {origin}{command}"
            )
        try:
            return read(SourceFiles(root, folders))
        except (InputError, OSError) as error:
            raise InputError(f"data source {name!r}: {error}; get it from {origin}") from error

    return Source(load, files, origin, transform, summary)


def _subset_note(train: Pair, test: Pair, official: tuple[int, int]) -> str:
    """Return a note if there are fewer images than in the official release, else an empty text."""
    counts = len(train[1]), len(test[1])
    if counts == official:
        return ""
    return (
        f"subset: {counts[0]:,} of {official[0]:,} training and {counts[1]:,} of {official[1]:,}"
        " test images"
    )


def _idx_files(*stems: str) -> tuple[str, ...]:
    return tuple(
        f"{stem}-{kind}-ubyte.gz" for stem in stems for kind in ("images-idx3", "labels-idx1")
    )


def _idx(files: SourceFiles, stem: str, count: int, md5: str, least: int, most: int) -> Pair:
    images, labels = (files.find(name, name.removesuffix(".gz")) for name in _idx_files(stem))
    x = formats.idx(images, (count, 28, 28), md5)
    return x[:, None], formats.idx(labels, (count,), labels=(least, most)) - least


@SOURCES.register
def digits() -> Source:
    """Scikit-learn's digits: small enough for a first run and for tests, and always available."""

    def load(root: Path | None) -> Data:
        from sklearn.datasets import load_digits

        loaded = load_digits()
        x, y = loaded.images[:, None].astype(np.uint8), loaded.target
        order = generator(("digits",)).permutation(len(y))
        fifths = [order[y[order] == c][: round(0.2 * (y == c).sum())] for c in range(10)]
        test = np.sort(np.concatenate(fifths))
        rest = np.setdiff1d(order, test)
        train = x[rest], y[rest]
        return from_arrays(train, (x[test], y[test]), name="digits", labels=DIGITS, scale=16.0)

    summary = "digits 0-9, 8x8 grey, 1,438 + 359; comes with scikit-learn"
    return Source(load, (), "scikit-learn", "normalise(mean=0.3053, std=0.376)", summary)


@SOURCES.register
def emnist(classes: Annotated[int, Bound(least=2, most=26), LATER] = 26) -> Source:
    """EMNIST's letters, the first `classes` of the alphabet.

    FedGen's code left out the z until April 2022.
    """

    def read(files: SourceFiles) -> Data:
        train = _idx(
            files, "emnist-letters-train", 124_800, "6b7a6cdb4e8ae8838780bb5aeda8ab2a", 1, 26
        )
        test = _idx(files, "emnist-letters-test", 20_800, "811ee95d607652077616dbaaea581e1d", 1, 26)
        kept = [(x[y < classes], y[y < classes]) for x, y in (train, test)]
        # NIST's images have rows and columns exchanged
        upright = [(x.transpose(0, 1, 3, 2), y) for x, y in kept]
        return from_arrays(*upright, name="emnist", labels=LETTERS[:classes])

    folders = ("emnist-letters", "gzip", "EMNIST/raw")
    names = _idx_files("emnist-letters-train", "emnist-letters-test")
    origin = "https://www.nist.gov/itl/products-and-services/emnist-dataset"
    summary = "EMNIST letters a-z, 28x28 grey, 124,800 + 20,800"
    return from_files("emnist", read, folders, names, origin, FEDMAX, summary)


@SOURCES.register
def mnist() -> Source:
    """MNIST's digits."""

    def read(files: SourceFiles) -> Data:
        train = _idx(files, "train", 60_000, "6bbc9ace898e44ae57da46a324031adb", 0, 9)
        test = _idx(files, "t10k", 10_000, "2646ac647ad5339dbf082846283269ea", 0, 9)
        return from_arrays(train, test, name="mnist", labels=DIGITS)

    origin, transform = "http://yann.lecun.com/exdb/mnist/", "normalise(mean=0.1307, std=0.3081)"
    folders, summary = ("mnist", "MNIST/raw"), "MNIST digits 0-9, 28x28 grey, 60,000 + 10,000"
    names = _idx_files("train", "t10k")
    return from_files("mnist", read, folders, names, origin, transform, summary)


@SOURCES.register
def fashion_mnist() -> Source:
    """Fashion-MNIST's pictures of clothes."""

    def read(files: SourceFiles) -> Data:
        train = _idx(files, "train", 60_000, "", 0, 9)
        test = _idx(files, "t10k", 10_000, "", 0, 9)
        return from_arrays(train, test, name="fashion_mnist", labels=FASHION)

    origin = "https://github.com/zalandoresearch/fashion-mnist"
    folders = ("fashion_mnist", "FashionMNIST/raw", "fashion-mnist")
    summary = "Fashion-MNIST, 10 kinds of clothes, 28x28 grey, 60,000 + 10,000"
    transform, names = "normalise(mean=0.286, std=0.353)", _idx_files("train", "t10k")
    return from_files("fashion_mnist", read, folders, names, origin, transform, summary)


def _cifar(
    name: str, labels: tuple[str, ...], folders: tuple[str, str], train: tuple[str, ...], test: str
) -> Source:
    def batch(files: SourceFiles, stem: str, count: int) -> Pair:
        path = files.find(f"{stem}.bin", stem)
        read = formats.cifar_binary if path.suffix == ".bin" else formats.cifar_pickle
        return read(path, count, len(labels))

    def read(files: SourceFiles) -> Data:
        parts = [batch(files, stem, 50_000 // len(train)) for stem in train]
        whole = np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])
        return from_arrays(whole, batch(files, test, 10_000), name=name, labels=labels)

    names = tuple(f"{stem}.bin" for stem in (*train, test))
    origin = "https://www.cs.toronto.edu/~kriz/cifar.html"
    title = name.upper().replace("CIFAR", "CIFAR-")
    summary = f"{title}, 32x32 colour, 50,000 + 10,000; binary or Python version"
    return from_files(name, read, folders, names, origin, FEDMA, summary)


@SOURCES.register
def cifar10() -> Source:
    """CIFAR-10."""
    folders = "cifar-10-batches-bin", "cifar-10-batches-py"
    batches = tuple(f"data_batch_{number}" for number in range(1, 6))
    return _cifar("cifar10", tuple(CIFAR10.split()), folders, batches, "test_batch")


@SOURCES.register
def cifar100() -> Source:
    """CIFAR-100, with its fine labels."""
    folders = "cifar-100-binary", "cifar-100-python"
    return _cifar("cifar100", tuple(CIFAR100.split()), folders, ("train",), "test")


@SOURCES.register
def svhn() -> Source:
    """SVHN's cropped digits."""
    official, names = (73_257, 26_032), ("train_32x32.mat", "test_32x32.mat")

    def read(files: SourceFiles) -> Data:
        train = formats.svhn(files.find(names[0]), official[0])
        test = formats.svhn(files.find(names[1]), official[1])
        note = _subset_note(train, test, official)
        return from_arrays(train, test, name="svhn", labels=DIGITS, note=note)

    origin = "http://ufldl.stanford.edu/housenumbers/"
    summary = "SVHN cropped digits 0-9, 32x32 colour, 73,257 + 26,032, or a part of them"
    return from_files("svhn", read, ("svhn",), names, origin, FEDBN, summary)


@SOURCES.register
def usps() -> Source:
    """USPS's digits."""

    def read(files: SourceFiles) -> Data:
        hdf5 = files.find_or_none("usps.h5")
        if hdf5:
            train = formats.usps_h5(hdf5, "train", 7291)
            test = formats.usps_h5(hdf5, "test", 2007)
        else:
            train = formats.usps_text(files.find("usps.bz2"), 7291)
            test = formats.usps_text(files.find("usps.t.bz2"), 2007)
        return from_arrays(train, test, name="usps", labels=DIGITS)

    origin = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass.html#usps"
    summary = "USPS digits 0-9, 16x16 grey, 7,291 + 2,007; usps.h5 is read too"
    names = "usps.bz2", "usps.t.bz2"
    return from_files("usps", read, ("usps",), names, origin, FEDBN, summary)


@SOURCES.register
def mnist_m() -> Source:
    """MNIST-M's digits."""
    official = 59_001, 9_001

    def split(files: SourceFiles, name: str, most: int) -> Pair:
        stem = f"mnist_m_{name}"
        labels = files.find_or_none(f"{stem}_labels.txt")
        separate = [stem, f"{stem}.tar", f"{stem}.tar.gz"] if labels else []
        return read_mnist_m(files.find(*separate, "mnist_m.tar.gz"), name, most, labels)

    def read(files: SourceFiles) -> Data:
        train, test = split(files, "train", official[0]), split(files, "test", official[1])
        note = _subset_note(train, test, official)
        return from_arrays(train, test, name="mnist_m", labels=DIGITS, note=note)

    names, origin = ("mnist_m.tar.gz",), "http://yaroslav.ganin.net"
    summary = "MNIST-M digits 0-9, 32x32 colour, 59,001 + 9,001, or a part of them"
    return from_files("mnist_m", read, ("mnist_m",), names, origin, FEDBN, summary)
