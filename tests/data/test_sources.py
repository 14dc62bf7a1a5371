"""Data sources: their contents, their error messages, and facts about the real files.

The last are tested if the files are present.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from feddkd.data.examples import Data, Examples, examples, from_arrays
from feddkd.data.sources import SOURCES
from feddkd.errors import InputError
from feddkd.randomness import generator

FILED = [
    "ag_news",
    "emnist",
    "fashion_mnist",
    "mnist",
    "cifar10",
    "cifar100",
    "svhn",
    "usps",
    "mnist_m",
]
RNG = generator(("test",))
X, Y = (
    torch.from_numpy(RNG.integers(0, 256, (8, 1, 4, 4), np.uint8)),
    torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]),
)


@pytest.fixture(scope="session")
def real_data() -> Path:
    here = Path(os.environ.get("FEDDKD_DATA", Path(__file__).parents[3] / "shared" / "data"))
    if not here.is_dir():
        pytest.skip(
            "the real files are not here: get them from where `feddkd data list` says, and name the"
            " folder by FEDDKD_DATA"
        )
    return here


def load(text: str, root: Path | None = None) -> Data:
    return SOURCES.one(text).load(root)


class Pairs(Dataset[tuple[Any, Any]]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def test_tensors_arrays_and_data_sets_give_the_same_examples() -> None:
    sources = [
        (X, Y),
        [X.numpy(), Y.numpy().astype(np.uint16)],
        (X, Y.double()),
        TensorDataset(X, Y),
        Pairs([(x.numpy(), int(y)) for x, y in zip(X, Y, strict=True)]),
        Examples(X, Y),
    ]
    for source in sources:
        found = examples(source)
        assert torch.equal(found.x, X)
        assert torch.equal(found.y, Y)
        assert found.y.dtype == torch.int64
        assert len(found) == 8


def test_examples_need_not_be_images() -> None:
    assert examples((torch.rand(8, 5), Y)).x.shape == (8, 5)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ((X[:, 0, 0, 0], Y), r"\(N, C, H, W\).* \(8,\)"),
        ((X[:0], Y[:0]), r"empty.* \(0, 1, 4, 4\)"),
        ((X[:5], Y), r"5 examples need labels of shape \(5,\), not \(8,\)"),
        ((X, torch.stack([Y, Y], 1)), r"labels of shape \(8,\), not \(8, 2\)"),
        ((X.long(), Y), "uint8 or floating point, not torch.int64"),
        ((torch.zeros(8, 32, 32, 3, dtype=torch.uint8), Y), "channels.*\\(8, 32, 32, 3\\)"),
        ((X / torch.tensor(0.0), Y), "NaN or infinite"),
        ((X, Y - 1), r"labels .* -1\.\.1"),
        ((X, Y * 10**12), "labels .* 0..99999"),
        ((X, Y + 0.5), r"whole numbers, not torch.float32 such as 0\.5"),
        ((X, Y / 0.0), "whole numbers"),
        ((X, Y == 0), "whole numbers, not torch.bool"),
        (
            (X.numpy(), np.array(list("abcabcab"))),
            "the labels must be a tensor or an array of numbers, not an array of <U1",
        ),
        (Examples(X, Y, Y - 5), "domains .* -5..-3"),
        (7, "not int"),
        (Pairs([X[0]]), "item 0 of the data set is not a pair"),
        (Pairs([(X[0], 1), (X[0][:, :2], 1)]), "one shape, not 2"),
        (
            Pairs([("picture", 1)]),
            "the example of item 0 must be a tensor or an array of numbers, not str",
        ),
        (Pairs([]), "empty"),
    ],
)
def test_examples_that_make_no_sense_are_refused_with_the_reason(source: Any, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        examples(source)


def test_own_arrays_become_data() -> None:
    data = from_arrays((X, Y), (X[:2], Y[:2]))
    assert (data.classes, data.labels, data.scale) == (3, ("0", "1", "2"), 255.0)
    assert from_arrays((X / 255, Y), (X / 255, Y), labels="abcd").classes == 4
    assert from_arrays((X / 255, Y), (X / 255, Y)).scale == 1.0
    with pytest.raises(InputError, match="label 2 has no name"):
        from_arrays((X, Y), (X, Y), labels="ab")
    with pytest.raises(InputError, match="alike"):
        from_arrays((X, Y), (X[:, :, 1:], Y))
    with pytest.raises(InputError, match="alike"):
        from_arrays((X, Y), (X / 255, Y))


def test_the_digest_tells_data_apart_and_nothing_else() -> None:
    base = from_arrays((X, Y), (X, Y))
    assert (
        base.digest
        == from_arrays((X.numpy(), Y.numpy()), (X, Y), name="other", note="other").digest
    )
    flat = X.reshape(8, 1, 2, 8)
    others = [
        ((X, Y.flip(0)), (X, Y)),
        ((255 - X, Y), (X, Y)),
        ((flat, Y), (flat, Y)),
        ((X, Y), (X[:4], Y[:4])),
    ]
    assert len({base.digest, *(from_arrays(*other).digest for other in others)}) == 5


@pytest.mark.parametrize("name", FILED)
def test_without_its_folder_a_source_says_what_it_needs_and_where_to_get_it(
    name: str, tmp_path: Path
) -> None:
    source = SOURCES.one(name)
    for root in (None, tmp_path / "absent"):
        with pytest.raises(InputError, match=r"--data DIR or FEDDKD_DATA") as caught:
            source.load(root)
        assert source.files[0] in str(caught.value)
        assert source.origin in str(caught.value)


@pytest.mark.parametrize("name", FILED)
def test_an_empty_folder_and_a_damaged_file_are_told_in_one_line_that_names_the_file(
    name: str, tmp_path: Path
) -> None:
    source = SOURCES.one(name)
    with pytest.raises(InputError, match=f"{source.files[0]}.* is not in .*get it from http"):
        source.load(tmp_path)
    for file in source.files:
        (tmp_path / file).write_bytes(b"random")
    with pytest.raises(
        InputError, match=f"{source.files[0]} is missing, damaged or not .*get it from http"
    ) as caught:
        source.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_every_source_can_be_written_down_and_tells_about_itself() -> None:
    for name in SOURCES:
        options = {"path": "path='a'", "shape": "shape='1x2x2', classes=2"}
        needed = [options[key] for key, usual in SOURCES.options(name).items() if key in options]
        source = SOURCES.one(f"{name}({', '.join(needed)})")
        assert SOURCES.one(str(source)) == source
        assert source.summary
        assert source.origin or name == "described"
        assert not source.transform or "normalise(" in source.transform


def test_importing_the_sources_imports_no_heavy_package() -> None:
    heavy = "{'sklearn', 'scipy', 'matplotlib', 'PIL', 'h5py', 'torchvision'}"
    code = f"import sys, feddkd.data.sources; sys.exit(', '.join({heavy} & set(sys.modules)) or 0)"
    path = str(Path(__file__).parents[2] / "src")
    assert (
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=False
        ).returncode
        == 0
    )


def test_digits_are_split_by_class_and_always_the_same_way() -> None:
    data = load("digits")
    assert (len(data.train), len(data.test), data.scale, int(data.train.x.max())) == (
        1438,
        359,
        16.0,
        16,
    )
    counts = data.train.y.bincount(), data.test.y.bincount()
    assert torch.equal((counts[1] / (counts[0] + counts[1]) * 5).round(), torch.ones(10))
    assert data.digest == load("digits").digest
    pixels = torch.cat([data.train.x, data.test.x]) / 16
    assert ((pixels - 0.3053) / 0.376).mean().abs() < 1e-3
    assert abs(((pixels - 0.3053) / 0.376).std() - 1) < 1e-3


def test_generated_digits_are_a_function_of_their_options() -> None:
    data = load("generated_digits(train=600, test=300)")
    assert data.train.x.shape == (600, 3, 32, 32)
    assert data.train.x.dtype == torch.uint8
    assert data.train.y.bincount().min() > 30
    assert "generated" in data.note
    assert data.digest == load("generated_digits(train=600, test=300, seed=0)").digest
    assert data.digest != load("generated_digits(train=600, test=300, seed=1)").digest
    assert not torch.equal(data.train.x[:300], data.test.x)


def test_generated_digits_can_be_told_apart_and_vary() -> None:
    x = load("generated_digits(train=1000, test=1)").train.x.float() / 255
    middle, border = x[:, :, 8:24, 8:24].flatten(1), x[:, :, :2].flatten(1)
    assert (middle.std(1) > 0.05).float().mean() > 0.98
    assert x.mean((1, 2, 3)).std() > 0.1
    assert border.mean(1).std() > 0.1


def write_usps(folder: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / "usps.h5", "w") as file:
        for split, count in (("train", 7291), ("test", 2007)):
            file[f"{split}/data"] = RNG.random((count, 256), np.float32)
            file[f"{split}/target"] = np.arange(count) % 10


def test_domains_are_pooled_and_split_anew_as_in_fedbn(tmp_path: Path) -> None:
    write_usps(tmp_path)
    data = load("digit_domains(domains='usps', per_domain=743)", tmp_path)
    assert data.train.x.shape == (743, 3, 28, 28)
    assert data.test.x.shape == (1860, 3, 28, 28)
    assert torch.equal(data.test.x[:, 0], data.test.x[:, 2])
    assert data.test.y.bincount().tolist() == [186] * 10
    with pytest.raises(InputError, match="7438"):
        load("digit_domains(domains='usps', per_domain=7439)", tmp_path)


@pytest.mark.parametrize(
    ("domains", "says"),
    [
        ("", "generated, mnist, mnist_m, svhn, usps"),
        ("mnist,mnist", "'mnist' is given twice"),
        ("mnist,letters", "'letters'; there are: generated, mnist, mnist_m, svhn, usps"),
    ],
)
def test_domains_that_do_not_exist_are_refused(domains: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        SOURCES.one(f"digit_domains(domains='{domains}')")


def test_own_npz_files_are_read_from_the_folder_or_by_path(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    np.savez(path, x_train=X, y_train=Y, x_test=X, y_test=Y)
    for data in (load("npz(path='own.npz')", tmp_path), load(f"npz(path={str(path)!r})")):
        assert torch.equal(data.train.x, X)
        assert data.classes == 3
    np.savez(path, x_train=X, y_train=Y, x_test=X, y_test=Y[:3])
    with pytest.raises(InputError, match=r"own.npz: 8 examples need labels"):
        load("npz(path='own.npz')", tmp_path)


TABLE = "length,kind,width,hospital\n" + "".join(
    f"{n},{n % 2 + 9},7,{'NS'[n % 4 // 2]}\n" for n in range(40)
)


def test_a_table_is_read_scaled_and_divided_always_the_same_way(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text(TABLE)
    data = load("csv(path='own.csv', label='kind', domain='hospital', test=0.25)", tmp_path)
    assert data.labels == ("9", "10")
    assert data.domains == ("N", "S")
    assert data.train.domain is not None
    assert data.test.domain is not None
    # a quarter, but to an even number
    assert torch.bincount(data.test.y + 2 * data.test.domain).tolist() == [2, 2, 2, 2]
    assert torch.allclose(data.train.x.mean(0), torch.zeros(2), atol=1e-6)
    # width never varies
    assert torch.allclose(data.train.x.std(0, correction=0), torch.tensor([1.0, 0.0]), atol=1e-6)
    assert (
        load("csv(path='own.csv', label='kind', domain='hospital', test=0.25)", tmp_path).digest
        == data.digest
    )
    # every line is in one of the two
    assert len(set(torch.cat([data.train.x, data.test.x])[:, 0].tolist())) == 40


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("a,b\n1,2\n", "no column 'label'.* a, b"),
        ("a,label\n1,x\n\nmany,y\n", "line 4, column 'a': 'many' is not a number"),
        ("a,label\n,x\n", "line 2, column 'a': '' is not a number"),
        ("a,label\nnan,x\n", "'nan' is not a number"),
        ("a,label\n1,x,3\n", "line 2.* 3 cells.* 2 columns"),
        ("a,label\n", "0 lines"),
        ("label\nx\n", "0 columns"),
        ("a,label\n1,x\n", "test=0.2"),
        ("", "missing, damaged or not a CSV table"),
    ],
)
def test_a_table_that_cannot_be_read_is_complained_of_by_line_and_column(
    content: str, complaint: str, tmp_path: Path
) -> None:
    (tmp_path / "own.csv").write_text(content)
    with pytest.raises(InputError, match=complaint):
        load("csv(path='own.csv')", tmp_path)


def picture(path: Path, level: int, size: tuple[int, int] = (5, 7)) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (level, 0, 0)).save(path)


def test_a_folder_of_images_is_read_with_its_folders_as_classes(tmp_path: Path) -> None:
    for n in range(10):
        picture(tmp_path / "photos" / "cat" / f"{n}.png", 10 + n)
        picture(tmp_path / "photos" / "dog" / f"{n}.jpg", 200)
    data = load("folder(path='photos', side=4)", tmp_path)
    assert data.labels == ("cat", "dog")
    assert data.train.x.shape == (16, 3, 4, 4)
    assert torch.bincount(data.test.y).tolist() == [2, 2]
    assert set(data.train.x[data.train.y == 0][:, 0].flatten().tolist()) < set(range(10, 20))
    assert load("folder(path='photos', side=4, colour=False)", tmp_path).test.x.shape == (
        4,
        1,
        4,
        4,
    )
    (tmp_path / "photos" / "cat" / "odd.png").write_text("no picture")
    with pytest.raises(InputError, match=r"odd.png is missing, damaged or not an image"):
        load("folder(path='photos')", tmp_path)


def test_a_folder_with_train_and_test_keeps_them_apart(tmp_path: Path) -> None:
    for part, kind, level in [("train", "a", 1), ("train", "b", 2), ("test", "b", 3)]:
        picture(tmp_path / part / kind / "one.png", level)
    data = load(f"folder(path={str(tmp_path)!r}, side=2)")
    assert (data.train.y.tolist(), data.test.y.tolist()) == ([0, 1], [1])
    assert set(data.test.x[0, 0].flatten().tolist()) == {3}
    with pytest.raises(InputError, match="has no folders with images"):
        load(f"folder(path={str(tmp_path / 'train' / 'a')!r})")


def spread(weights: Tensor) -> float:
    """The standard deviation of positions 0, 1, 2, ... under these weights."""
    place = torch.arange(len(weights)).double()
    return float(((place - centre(weights)) ** 2 * weights).sum().div(weights.sum()).sqrt())


def centre(weights: Tensor) -> float:
    return float((torch.arange(len(weights)).double() * weights).sum() / weights.sum())


def test_emnist_may_end_before_the_z(real_data: Path) -> None:
    data = load("emnist(classes=25)", real_data)
    assert (data.classes, data.labels[-1]) == (25, "y")
    assert data.train.y.bincount().tolist() == [4800] * 25
    assert data.test.y.bincount().tolist() == [800] * 25


def test_real_emnist_is_whole_balanced_and_upright(real_data: Path) -> None:
    data = load("emnist", real_data)
    assert data.labels == tuple("abcdefghijklmnopqrstuvwxyz")
    assert data.train.y.bincount().tolist() == [4800] * 26
    assert data.test.y.bincount().tolist() == [800] * 26
    mean = {
        name: data.test.x[data.test.y == label, 0].double().mean(0)
        for label, name in enumerate(data.labels)
    }
    assert spread(mean["l"].sum(1)) > 1.2 * spread(mean["l"].sum(0))  # an l stands
    # a v is open at the top
    assert spread(mean["v"][:10].sum(0)) > 1.2 * spread(mean["v"][18:].sum(0))
    # a p's stem is on the left
    assert centre(mean["p"][18:].sum(0)) < centre(mean["p"][:14].sum(0)) - 1


@pytest.mark.parametrize(
    ("name", "train", "test", "shape"),
    [
        ("mnist", 60_000, 10_000, (1, 28, 28)),
        ("usps", 7_291, 2_007, (1, 16, 16)),
        ("svhn", 73_257, 26_032, (3, 32, 32)),
    ],
)
def test_the_other_real_files_hold_what_was_published_or_say_that_they_are_a_part(
    name: str, train: int, test: int, shape: tuple[int, ...], real_data: Path
) -> None:
    data = load(name, real_data)
    assert data.train.x.shape[1:] == shape
    assert data.classes == 10
    whole = (len(data.train), len(data.test)) == (train, test)
    assert (
        whole
        or data.note
        == f"subset: {len(data.train):,} of {train:,} training and {len(data.test):,} of {test:,}"
        " test images"
    )


def test_the_five_real_domains_are_equal_in_training_and_named(real_data: Path) -> None:
    data = load("digit_domains", real_data)
    assert data.domains == ("mnist", "svhn", "usps", "generated", "mnist_m")
    assert data.train.x.shape == (5 * 743, 3, 28, 28)
    assert data.train.domain is not None
    assert data.test.domain is not None
    assert data.train.domain.bincount().tolist() == [743] * 5
    assert data.test.domain.bincount()[[0, 2]].tolist() == [14_000, 1_860]
    assert "not SynthDigits" in data.note
