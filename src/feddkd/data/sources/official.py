"""Data sources: a name -> arrays, checked.

Files are read where the user keeps them, laid out as their official releases are; nothing is
downloaded. Pixels stay the whole numbers they were published as; what becomes of them is the
transform's business.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np

from feddkd.data.examples import Data, from_arrays
from feddkd.data.sources import formats, rendered_digits
from feddkd.data.sources.digit_domains import digit_domains as digit_domains  # registers itself
from feddkd.data.sources.formats import Pair, SourceFolder
from feddkd.data.sources.own_files import npz as npz  # with it csv, folder and test_only
from feddkd.data.sources.registry import SOURCES as SOURCES
from feddkd.data.sources.registry import Source as Source
from feddkd.errors import InputError
from feddkd.randomness import generator
from feddkd.spec.types import LATER, Bound, Whole

Drawn = Annotated[int, Bound(least=1, most=1_000_000)]  # more is a slip
DIGITS = tuple("0123456789")
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
CIFAR100 = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
    forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
    mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
    possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
    sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree
    wolf woman worm
"""
FEDMA_MEAN, FEDMA_STD = (  # FedMA writes them as grey levels; nine digits keep every bit of float32
    ",".join(f"{level / 255:.9g}" for level in levels)
    for levels in ((125.3, 123.0, 113.9), (63.0, 62.1, 66.7))
)
FEDMA = f"crop(padding=4) | flip() | normalise(mean='{FEDMA_MEAN}', std='{FEDMA_STD}')"
FEDMAX = "pad(pixels=2) | normalise(mean=0.1307, std=0.3081)"
FEDBN = "normalise(mean=0.5, std=0.5)"


def _filed(
    name: str,
    read: Callable[[SourceFolder], Data],
    folders: tuple[str, ...],
    files: tuple[str, ...],
    origin: str,
    transform: str,
    summary: str,
) -> Source:
    """A source in files. Every complaint about them ends with where to get them."""

    def load(root: Path | None) -> Data:
        if root is None or not root.is_dir():
            lack = "the folder is not given" if root is None else f"there is no folder {root}"
            raise InputError(
                f"data source {name!r}: {lack}; name it by --data DIR or FEDDKD_DATA; it should"
                f" hold {folders[0]}/ with {', '.join(files)}, from {origin}"
            )
        try:
            return read(SourceFolder(root, folders))
        except (InputError, OSError) as error:
            raise InputError(f"data source {name!r}: {error}; get it from {origin}") from error

    return Source(load, files, origin, transform, summary)


def _subset(counts: Sequence[int], official: Sequence[int]) -> str:
    """A note where less than the official release is there; nothing where all is."""
    told = [
        f"{n:,} of {of:,} {kind}"
        for n, of, kind in zip(counts, official, ("training", "test"), strict=True)
    ]
    return "" if tuple(counts) == tuple(official) else f"subset: {told[0]} and {told[1]} images"


def _idx_files(*stems: str) -> tuple[str, ...]:
    return tuple(
        f"{stem}-{kind}-ubyte.gz" for stem in stems for kind in ("images-idx3", "labels-idx1")
    )


def _idx(shelf: SourceFolder, stem: str, count: int, md5: str, least: int, most: int) -> Pair:
    images, labels = (shelf.find(file, file.removesuffix(".gz")) for file in _idx_files(stem))
    x = formats.idx(images, (count, 28, 28), md5)
    return x[:, None], formats.idx(labels, (count,), labels=(least, most)) - least


@SOURCES.register
def digits() -> Source:
    """Scikit-learn's digits: small enough for a first run and for tests, and always there."""

    def load(root: Path | None) -> Data:
        from sklearn.datasets import load_digits

        found = load_digits()
        x, y = found.images[:, None].astype(np.uint8), found.target
        mixed = generator(("digits",)).permutation(len(y))
        test = np.sort(
            np.concatenate([mixed[y[mixed] == c][: round(0.2 * (y == c).sum())] for c in range(10)])
        )
        rest = np.setdiff1d(mixed, test)
        return from_arrays(
            (x[rest], y[rest]), (x[test], y[test]), name="digits", labels=DIGITS, scale=16.0
        )

    summary = "digits 0-9, 8x8 grey, 1,438 + 359; comes with scikit-learn"
    return Source(load, (), "scikit-learn", "normalise(mean=0.3053, std=0.376)", summary)


@SOURCES.register
def emnist(classes: Annotated[int, Bound(least=2, most=26), LATER] = 26) -> Source:
    """EMNIST's letters, the first so many of the alphabet: FedGen's code lost the z until April
    2022.
    """

    def read(shelf: SourceFolder) -> Data:
        train = _idx(
            shelf, "emnist-letters-train", 124_800, "6b7a6cdb4e8ae8838780bb5aeda8ab2a", 1, 26
        )
        test = _idx(shelf, "emnist-letters-test", 20_800, "811ee95d607652077616dbaaea581e1d", 1, 26)
        kept = [(x[y < classes], y[y < classes]) for x, y in (train, test)]
        # NIST ships them lying on their side
        upright = [(x.transpose(0, 1, 3, 2), y) for x, y in kept]
        return from_arrays(*upright, name="emnist", labels=LETTERS[:classes])

    folders, summary = (
        ("emnist-letters", "gzip", "EMNIST/raw"),
        "EMNIST letters a-z, 28x28 grey, 124,800 + 20,800",
    )
    origin = "https://www.nist.gov/itl/products-and-services/emnist-dataset"
    return _filed(
        "emnist",
        read,
        folders,
        _idx_files("emnist-letters-train", "emnist-letters-test"),
        origin,
        FEDMAX,
        summary,
    )


@SOURCES.register
def mnist() -> Source:
    def read(shelf: SourceFolder) -> Data:
        train = _idx(shelf, "train", 60_000, "6bbc9ace898e44ae57da46a324031adb", 0, 9)
        test = _idx(shelf, "t10k", 10_000, "2646ac647ad5339dbf082846283269ea", 0, 9)
        return from_arrays(train, test, name="mnist", labels=DIGITS)

    origin, transform = "http://yann.lecun.com/exdb/mnist/", "normalise(mean=0.1307, std=0.3081)"
    folders, summary = ("mnist", "MNIST/raw"), "MNIST digits 0-9, 28x28 grey, 60,000 + 10,000"
    return _filed("mnist", read, folders, _idx_files("train", "t10k"), origin, transform, summary)


def _cifar(
    name: str, labels: tuple[str, ...], folders: tuple[str, str], train: tuple[str, ...], test: str
) -> Source:
    def batch(shelf: SourceFolder, stem: str, count: int) -> Pair:
        path = shelf.find(f"{stem}.bin", stem)
        read = formats.cifar_binary if path.suffix == ".bin" else formats.cifar_pickle
        return read(path, count, len(labels))

    def read(shelf: SourceFolder) -> Data:
        parts = [batch(shelf, stem, 50_000 // len(train)) for stem in train]
        whole = np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])
        return from_arrays(whole, batch(shelf, test, 10_000), name=name, labels=labels)

    files = tuple(f"{stem}.bin" for stem in (*train, test))
    summary = (
        f"{name.upper().replace('CIFAR', 'CIFAR-')}, 32x32 colour, 50,000 + 10,000; binary or"
        " Python version"
    )
    return _filed(
        name, read, folders, files, "https://www.cs.toronto.edu/~kriz/cifar.html", FEDMA, summary
    )


@SOURCES.register
def cifar10() -> Source:
    batches = tuple(f"data_batch_{number}" for number in range(1, 6))
    return _cifar(
        "cifar10",
        tuple(CIFAR10.split()),
        ("cifar-10-batches-bin", "cifar-10-batches-py"),
        batches,
        "test_batch",
    )


@SOURCES.register
def cifar100() -> Source:
    return _cifar(
        "cifar100",
        tuple(CIFAR100.split()),
        ("cifar-100-binary", "cifar-100-python"),
        ("train",),
        "test",
    )


@SOURCES.register
def svhn() -> Source:
    official = 73_257, 26_032

    def read(shelf: SourceFolder) -> Data:
        train, test = (
            formats.svhn(shelf.find(f"{s}_32x32.mat"), n)
            for s, n in zip(("train", "test"), official, strict=True)
        )
        return from_arrays(
            train,
            test,
            name="svhn",
            labels=DIGITS,
            note=_subset((len(train[1]), len(test[1])), official),
        )

    files = "train_32x32.mat", "test_32x32.mat"
    summary = "SVHN cropped digits 0-9, 32x32 colour, 73,257 + 26,032, or a part of them"
    return _filed(
        "svhn", read, ("svhn",), files, "http://ufldl.stanford.edu/housenumbers/", FEDBN, summary
    )


@SOURCES.register
def usps() -> Source:
    def read(shelf: SourceFolder) -> Data:
        packed = shelf.seek("usps.h5")
        if packed:
            train, test = (
                formats.usps_h5(packed, "train", 7291),
                formats.usps_h5(packed, "test", 2007),
            )
        else:
            train, test = (
                formats.usps_text(shelf.find("usps.bz2"), 7291),
                formats.usps_text(shelf.find("usps.t.bz2"), 2007),
            )
        return from_arrays(train, test, name="usps", labels=DIGITS)

    origin = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass.html#usps"
    summary = "USPS digits 0-9, 16x16 grey, 7,291 + 2,007; usps.h5 is read too"
    return _filed("usps", read, ("usps",), ("usps.bz2", "usps.t.bz2"), origin, FEDBN, summary)


@SOURCES.register
def mnist_m() -> Source:
    official = 59_001, 9_001

    def split(shelf: SourceFolder, name: str, most: int) -> Pair:
        labels = shelf.seek(f"mnist_m_{name}_labels.txt")
        apart = (
            [f"mnist_m_{name}", f"mnist_m_{name}.tar", f"mnist_m_{name}.tar.gz"] if labels else []
        )
        return formats.mnist_m(shelf.find(*apart, "mnist_m.tar.gz"), name, most, labels)

    def read(shelf: SourceFolder) -> Data:
        train, test = split(shelf, "train", official[0]), split(shelf, "test", official[1])
        return from_arrays(
            train,
            test,
            name="mnist_m",
            labels=DIGITS,
            note=_subset((len(train[1]), len(test[1])), official),
        )

    summary = "MNIST-M digits 0-9, 32x32 colour, 59,001 + 9,001, or a part of them"
    return _filed(
        "mnist_m",
        read,
        ("mnist_m",),
        ("mnist_m.tar.gz",),
        "http://yaroslav.ganin.net",
        FEDBN,
        summary,
    )


@SOURCES.register
def generated_digits(train: Drawn = 7438, test: Drawn = 4000, seed: Whole = 0) -> Source:
    """A stand-in for SynthDigits, drawn here from fonts."""

    def load(root: Path | None) -> Data:
        first = rendered_digits.render(train, ("generated digits", seed, "train"))
        second = rendered_digits.render(test, ("generated digits", seed, "test"))
        return from_arrays(
            first,
            second,
            name="generated_digits",
            labels=DIGITS,
            note="generated from fonts, not SynthDigits",
        )

    summary = "digits 0-9 generated from fonts, 32x32 colour; not SynthDigits"
    return Source(load, (), "generated from matplotlib's fonts", FEDBN, summary)
