"""Data sources: a name -> arrays, checked.

Files are read where the user keeps them, laid out as their official releases are; nothing is downloaded. Pixels stay the
whole numbers they were published as; what becomes of them is the transform's business.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from feddkd.data import formats, generated
from feddkd.data.formats import Array, Pair, Shelf
from feddkd.errors import InputError, choices
from feddkd.keys import generator
from feddkd.spelling import Count, Registry, Spelled, Whole

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
    ",".join(f"{level / 255:.9g}" for level in levels) for levels in ((125.3, 123.0, 113.9), (63.0, 62.1, 66.7))
)
FEDMA = f"crop(padding=4) | flip() | normalise(mean='{FEDMA_MEAN}', std='{FEDMA_STD}')"
FEDMAX = "pad(pixels=2) | normalise(mean=0.1307, std=0.3081)"
FEDBN = "normalise(mean=0.5, std=0.5)"
MOST_CLASSES = 100_000  # a label beyond it is a slip, such as a pixel or an identity number


@dataclass(frozen=True, eq=False)
class Examples:
    """Images and their labels; of a source with several domains also the domain each one came from."""

    x: Tensor  # (N, C, H, W), unsigned bytes; where they are the user's own, (N, ...) and perhaps floating point
    y: Tensor  # (N,), int64
    domain: Tensor | None = None  # (N,), int64

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True, eq=False)
class Data:
    """What a source holds."""

    name: str
    train: Examples
    test: Examples
    classes: int
    labels: tuple[str, ...]
    scale: float  # what a full-scale pixel is
    domains: tuple[str, ...] = ()
    note: str = ""

    @functools.cached_property
    def digest(self) -> str:
        """Tells two sets of data apart: sha256 over every tensor's bytes, shape and type."""
        found = hashlib.sha256()
        for part in (self.train, self.test):
            for tensor in (part.x, part.y, *([] if part.domain is None else [part.domain])):
                found.update(f"{tuple(tensor.shape)} {tensor.dtype};".encode())
                found.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()


@dataclass(frozen=True, eq=False)
class Source(Spelled):
    """How one set of data is had: what must be in the folder, where to get it, how to read it."""

    load: Callable[[Path | None], Data]
    files: tuple[str, ...]
    origin: str
    transform: str
    summary: str


SOURCES: Registry[Source] = Registry("data source", "feddkd.data")


def examples(source: Any) -> Examples:
    """Examples of the user's own: a pair (x, y) of tensors or arrays, or a map-style data set of such items."""
    if isinstance(source, Examples):
        return _checked(source.x, source.y, source.domain)
    if isinstance(source, tuple | list) and len(source) == 2 and all(isinstance(part, Tensor | np.ndarray) for part in source):
        return _checked(_tensor(source[0], "the images"), _tensor(source[1], "the labels"))
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        raise InputError(f"examples are a pair (x, y) of tensors or arrays, or a map-style data set; not {type(source).__name__}")
    items = [_item(source[index], index) for index in range(len(source))]
    if len({x.shape for x, _ in items}) != 1:
        raise InputError(f"the images of a data set must all have one shape, not {len({x.shape for x, _ in items})} shapes")
    return _checked(torch.stack([x for x, _ in items]), torch.stack([y for _, y in items]))


def _item(item: Any, index: int) -> tuple[Tensor, Tensor]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise InputError(f"item {index} of the data set is not a pair (image, label)")
    label = item[1] if isinstance(item[1], Tensor) else np.asarray(item[1])
    return _tensor(item[0], f"the image of item {index}"), _tensor(label, f"the label of item {index}")


def _tensor(value: Any, what: str) -> Tensor:
    """On the host, of a type that torch knows. A copy of arrays, since they may be read-only or another's byte order."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
        found = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise InputError(f"{what} must be a tensor or an array of numbers, not {found}")
    if value.dtype.itemsize > 8 or (value.dtype.kind == "u" and value.dtype.itemsize > 1):
        value = value.astype(np.float64 if value.dtype.kind == "f" else np.int64)
    return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C"))


def _checked(x: Tensor, y: Tensor, domain: Tensor | None = None) -> Examples:
    if x.ndim < 2 or 0 in x.shape:
        raise InputError(f"examples must be of shape (N, ...), images of shape (N, C, H, W), and not empty; not {tuple(x.shape)}")
    if x.dtype != torch.uint8 and not x.is_floating_point():
        raise InputError(f"images must be uint8 or floating point, not {x.dtype}")
    if x.dtype == torch.uint8 and x.ndim == 4 and x.shape[1] > 4 >= x.shape[3]:
        raise InputError(f"the channels must come first, (N, C, H, W); {tuple(x.shape)} looks like channels last")
    if x.is_floating_point() and not bool(x.isfinite().all()):
        raise InputError("the images hold NaN or infinite values")
    for name, values in (("labels", y), ("domains", y if domain is None else domain)):
        _check_whole(name, values, len(x))
    return Examples(x, y.long(), None if domain is None else domain.long())


def _check_whole(name: str, values: Tensor, count: int) -> None:
    if values.shape != (count,):
        raise InputError(f"{count} images need {name} of shape ({count},), not {tuple(values.shape)}")
    if values.dtype == torch.bool or values.is_complex() or not bool((values.double() == values.double().floor()).all()):
        raise InputError(f"{name} must be whole numbers, not {values.dtype} such as {values[0].item()}")
    least, most = values.double().min().item(), values.double().max().item()
    if least < 0 or most >= MOST_CLASSES:
        raise InputError(f"{name} must lie in 0..{MOST_CLASSES - 1}; these lie in {least:g}..{most:g}")


def from_arrays(
    train: Any,
    test: Any,
    *,
    name: str = "arrays",
    labels: Sequence[str] = (),
    scale: float | None = None,
    domains: Sequence[str] = (),
    note: str = "",
) -> Data:
    """Data of the user's own; `train` and `test` are what `examples` takes. Bytes are of full scale 255, other numbers of 1."""
    train, test = examples(train), examples(test)
    if train.x.shape[1:] != test.x.shape[1:] or train.x.dtype != test.x.dtype:
        kinds = [f"{part.x.dtype} {tuple(part.x.shape[1:])}" for part in (train, test)]
        raise InputError(f"training and test images must be alike, not {kinds[0]} and {kinds[1]}")
    classes = 1 + int(max(train.y.max(), test.y.max()))
    if labels and classes > len(labels):
        raise InputError(f"label {classes - 1} has no name; {len(labels)} are given, for 0..{len(labels) - 1}")
    names = tuple(labels) or tuple(str(label) for label in range(classes))
    full = 255.0 if train.x.dtype == torch.uint8 else 1.0
    return Data(name, train, test, len(names), names, full if scale is None else scale, tuple(domains), note)


def _filed(
    name: str,
    read: Callable[[Shelf], Data],
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
                f"data source {name!r}: {lack}; name it by --data DIR or FEDDKD_DATA; it should hold {folders[0]}/ with "
                f"{', '.join(files)}, from {origin}"
            )
        try:
            return read(Shelf(root, folders))
        except (InputError, OSError) as error:
            raise InputError(f"data source {name!r}: {error}; get it from {origin}") from error

    return Source(load, files, origin, transform, summary)


def _subset(counts: Sequence[int], official: Sequence[int]) -> str:
    """A note where less than the official release is there; nothing where all is."""
    told = [f"{n:,} of {of:,} {kind}" for n, of, kind in zip(counts, official, ("training", "test"), strict=True)]
    return "" if tuple(counts) == tuple(official) else f"subset: {told[0]} and {told[1]} images"


def _idx_files(*stems: str) -> tuple[str, ...]:
    return tuple(f"{stem}-{kind}-ubyte.gz" for stem in stems for kind in ("images-idx3", "labels-idx1"))


def _idx(shelf: Shelf, stem: str, count: int, md5: str, least: int, most: int) -> Pair:
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
        test = np.sort(np.concatenate([mixed[y[mixed] == c][: round(0.2 * (y == c).sum())] for c in range(10)]))
        rest = np.setdiff1d(mixed, test)
        return from_arrays((x[rest], y[rest]), (x[test], y[test]), name="digits", labels=DIGITS, scale=16.0)

    summary = "digits 0-9, 8x8 grey, 1,438 + 359; comes with scikit-learn"
    return Source(load, (), "scikit-learn", "normalise(mean=0.3053, std=0.376)", summary)


@SOURCES.register
def emnist() -> Source:
    def read(shelf: Shelf) -> Data:
        train = _idx(shelf, "emnist-letters-train", 124_800, "6b7a6cdb4e8ae8838780bb5aeda8ab2a", 1, 26)
        test = _idx(shelf, "emnist-letters-test", 20_800, "811ee95d607652077616dbaaea581e1d", 1, 26)
        upright = [(x.transpose(0, 1, 3, 2), y) for x, y in (train, test)]  # NIST ships them lying on their side
        return from_arrays(*upright, name="emnist", labels=LETTERS)

    folders, summary = ("emnist-letters", "gzip", "EMNIST/raw"), "EMNIST letters a-z, 28x28 grey, 124,800 + 20,800"
    origin = "https://www.nist.gov/itl/products-and-services/emnist-dataset"
    return _filed("emnist", read, folders, _idx_files("emnist-letters-train", "emnist-letters-test"), origin, FEDMAX, summary)


@SOURCES.register
def mnist() -> Source:
    def read(shelf: Shelf) -> Data:
        train = _idx(shelf, "train", 60_000, "6bbc9ace898e44ae57da46a324031adb", 0, 9)
        test = _idx(shelf, "t10k", 10_000, "2646ac647ad5339dbf082846283269ea", 0, 9)
        return from_arrays(train, test, name="mnist", labels=DIGITS)

    origin, transform = "http://yann.lecun.com/exdb/mnist/", "normalise(mean=0.1307, std=0.3081)"
    folders, summary = ("mnist", "MNIST/raw"), "MNIST digits 0-9, 28x28 grey, 60,000 + 10,000"
    return _filed("mnist", read, folders, _idx_files("train", "t10k"), origin, transform, summary)


def _cifar(name: str, labels: tuple[str, ...], folders: tuple[str, str], train: tuple[str, ...], test: str) -> Source:
    def batch(shelf: Shelf, stem: str, count: int) -> Pair:
        path = shelf.find(f"{stem}.bin", stem)
        read = formats.cifar_binary if path.suffix == ".bin" else formats.cifar_pickle
        return read(path, count, len(labels))

    def read(shelf: Shelf) -> Data:
        parts = [batch(shelf, stem, 50_000 // len(train)) for stem in train]
        whole = np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])
        return from_arrays(whole, batch(shelf, test, 10_000), name=name, labels=labels)

    files = tuple(f"{stem}.bin" for stem in (*train, test))
    summary = f"{name.upper().replace('CIFAR', 'CIFAR-')}, 32x32 colour, 50,000 + 10,000; binary or Python version"
    return _filed(name, read, folders, files, "https://www.cs.toronto.edu/~kriz/cifar.html", FEDMA, summary)


@SOURCES.register
def cifar10() -> Source:
    batches = tuple(f"data_batch_{number}" for number in range(1, 6))
    return _cifar("cifar10", tuple(CIFAR10.split()), ("cifar-10-batches-bin", "cifar-10-batches-py"), batches, "test_batch")


@SOURCES.register
def cifar100() -> Source:
    return _cifar("cifar100", tuple(CIFAR100.split()), ("cifar-100-binary", "cifar-100-python"), ("train",), "test")


@SOURCES.register
def svhn() -> Source:
    official = 73_257, 26_032

    def read(shelf: Shelf) -> Data:
        train, test = (formats.svhn(shelf.find(f"{s}_32x32.mat"), n) for s, n in zip(("train", "test"), official, strict=True))
        return from_arrays(train, test, name="svhn", labels=DIGITS, note=_subset((len(train[1]), len(test[1])), official))

    files = "train_32x32.mat", "test_32x32.mat"
    summary = "SVHN cropped digits 0-9, 32x32 colour, 73,257 + 26,032, or a part of them"
    return _filed("svhn", read, ("svhn",), files, "http://ufldl.stanford.edu/housenumbers/", FEDBN, summary)


@SOURCES.register
def usps() -> Source:
    def read(shelf: Shelf) -> Data:
        packed = shelf.seek("usps.h5")
        if packed:
            train, test = formats.usps_h5(packed, "train", 7291), formats.usps_h5(packed, "test", 2007)
        else:
            train, test = formats.usps_text(shelf.find("usps.bz2"), 7291), formats.usps_text(shelf.find("usps.t.bz2"), 2007)
        return from_arrays(train, test, name="usps", labels=DIGITS)

    origin = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass.html#usps"
    summary = "USPS digits 0-9, 16x16 grey, 7,291 + 2,007; usps.h5 is read too"
    return _filed("usps", read, ("usps",), ("usps.bz2", "usps.t.bz2"), origin, FEDBN, summary)


@SOURCES.register
def mnist_m() -> Source:
    official = 59_001, 9_001

    def split(shelf: Shelf, name: str, most: int) -> Pair:
        labels = shelf.seek(f"mnist_m_{name}_labels.txt")
        apart = [f"mnist_m_{name}", f"mnist_m_{name}.tar", f"mnist_m_{name}.tar.gz"] if labels else []
        return formats.mnist_m(shelf.find(*apart, "mnist_m.tar.gz"), name, most, labels)

    def read(shelf: Shelf) -> Data:
        train, test = split(shelf, "train", official[0]), split(shelf, "test", official[1])
        return from_arrays(train, test, name="mnist_m", labels=DIGITS, note=_subset((len(train[1]), len(test[1])), official))

    summary = "MNIST-M digits 0-9, 32x32 colour, 59,001 + 9,001, or a part of them"
    return _filed("mnist_m", read, ("mnist_m",), ("mnist_m.tar.gz",), "http://yaroslav.ganin.net", FEDBN, summary)


@SOURCES.register
def generated_digits(train: Count = 7438, test: Count = 4000, seed: Whole = 0) -> Source:
    """A stand-in for SynthDigits, drawn here from fonts."""

    def load(root: Path | None) -> Data:
        first = generated.render(train, ("generated digits", seed, "train"))
        second = generated.render(test, ("generated digits", seed, "test"))
        return from_arrays(first, second, name="generated_digits", labels=DIGITS, note="generated from fonts, not SynthDigits")

    summary = "digits 0-9 generated from fonts, 32x32 colour; not SynthDigits"
    return Source(load, (), "generated from matplotlib's fonts", FEDBN, summary)


DOMAINS = {"mnist": "mnist", "svhn": "svhn", "usps": "usps", "generated": "generated_digits", "mnist_m": "mnist_m"}


@SOURCES.register
def digit_domains(domains: str = "mnist,svhn,usps,generated,mnist_m", per_domain: Count = 743) -> Source:
    """FedBN's job: five kinds of digits, as many of each to train on (743 is a tenth of USPS), all of the rest to test on."""
    names = tuple(name.strip() for name in domains.split(","))
    for name in names:
        if name not in DOMAINS or names.count(name) > 1:
            raise InputError(f"digit_domains: {name!r} is unknown or named twice; domains are {choices(DOMAINS)}")

    def load(root: Path | None) -> Data:
        found = [SOURCES[DOMAINS[name]]().load(root) for name in names]
        parts = [_domain(data, index, per_domain) for index, data in enumerate(found)]
        notes = [f"domain {name!r}: {data.note}" for name, data in zip(names, found, strict=True) if data.note]
        train, test = (_joined([part[side] for part in parts]) for side in (0, 1))
        return from_arrays(train, test, name="digit_domains", labels=DIGITS, domains=names, note="; ".join(notes))

    inner = [SOURCES[DOMAINS[name]]() for name in names]
    files, origin = tuple(file for source in inner for file in source.files), "; ".join(source.origin for source in inner)
    summary = "FedBN's digits from up to five domains, 28x28 colour; the domain 'generated' stands in for SynthDigits"
    return Source(load, files, origin, FEDBN, summary)


def _domain(data: Data, index: int, count: int) -> tuple[Examples, Examples]:
    """Training and test images pooled and split anew, 80/20, exactly as FedBN does."""
    from sklearn.model_selection import StratifiedShuffleSplit

    x, y = torch.cat([data.train.x, data.test.x]).numpy(), torch.cat([data.train.y, data.test.y]).numpy()
    try:
        train, test = next(StratifiedShuffleSplit(n_splits=1, test_size=0.2, random_state=0).split(y, y))
    except ValueError as error:
        raise InputError(f"digit_domains: {data.name!r} has too few images of some class: {error}") from error
    if len(train) < count:
        raise InputError(f"digit_domains: per_domain={count}, but {data.name!r} has only {len(train)} images to train on")

    def part(pick: Array) -> Examples:
        return Examples(_alike(x[pick]), torch.from_numpy(y[pick]), torch.full((len(pick),), index))

    return part(train[:count]), part(test)


def _alike(x: Array) -> Tensor:
    """28x28 in three channels, resized as PIL does: bilinear, each image by itself."""
    from PIL import Image

    if x.shape[-1] != 28:
        flat = x[:, 0] if x.shape[1] == 1 else x.transpose(0, 2, 3, 1)
        resized = [np.asarray(Image.fromarray(image).resize((28, 28), Image.Resampling.BILINEAR)) for image in flat]
        x = np.stack(resized).reshape(len(x), 28, 28, -1).transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(np.broadcast_to(x, (len(x), 3, 28, 28))))


def _joined(parts: Sequence[Examples]) -> Examples:
    domain = torch.cat([part.domain for part in parts if part.domain is not None])
    return Examples(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]), domain)


@SOURCES.register
def npz(path: str) -> Source:
    """The user's own arrays."""
    names = ("x_train", "y_train", "x_test", "y_test")

    def load(root: Path | None) -> Data:
        inside = (root or Path()) / path
        found = formats.npz(inside if inside.exists() else Path(path), names)
        try:
            return from_arrays((found[0], found[1]), (found[2], found[3]), name=Path(path).stem)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error

    summary = f"your own arrays: an .npz with {', '.join(names)}"
    return Source(load, (path,), "your own arrays", "normalise(mean=0.0, std=1.0)", summary)
