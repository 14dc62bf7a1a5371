"""Laws of the readers:

a good file gives what was written; any other ends in one line that names the file.
"""

import bz2
import contextlib
import gzip
import io
import os
import pickle
import struct
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.io import savemat

from feddkd.data.sources import formats, mnist_m
from feddkd.errors import InputError

h5py = pytest.importorskip("h5py")
N = 6
RNG = np.random.default_rng(0)
GREY, COLOUR = (
    RNG.integers(0, 256, (N, 1, 16, 16), np.uint8),
    RNG.integers(0, 256, (N, 3, 32, 32), np.uint8),
)
LABELS = np.array([0, 1, 2, 9, 5, 3])


def as_idx(values: np.ndarray[Any, Any]) -> bytes:
    values = values.astype(np.uint8)
    return (
        bytes([0, 0, 8, values.ndim])
        + struct.pack(f">{values.ndim}I", *values.shape)
        + values.tobytes()
    )


def as_png(image: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image.transpose(1, 2, 0)).save(file, "PNG")
    return file.getvalue()


class Python2Pickler(pickle._Pickler):
    """Text and bytes as Python 2 wrote them: one and the same string type."""

    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)

    def save_string(self: Any, value: str | bytes) -> None:
        raw = value.encode() if isinstance(value, str) else value
        self.write(b"T" + struct.pack("<i", len(raw)) + raw)

    dispatch[str] = dispatch[bytes] = save_string


def as_python2_pickle(value: Any) -> bytes:
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(value)
    return file.getvalue().replace(b"numpy._core", b"numpy.core")


def as_text(sign: str = "") -> bytes:
    rows = ((GREY.reshape(N, -1) + 0.5) / 255 * 2 - 1).clip(-1, 1)
    lines = [
        f"{sign}{y + 1} " + " ".join(f"{i + 1}:{v:.6f}" for i, v in enumerate(row))
        for y, row in zip(LABELS, rows, strict=True)
    ]
    return "\n".join(lines).encode()


def as_tar(files: dict[str, bytes], mode: str = "w:") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def as_saved(save: Callable[[io.BytesIO], None]) -> bytes:
    file = io.BytesIO()
    save(file)
    return file.getvalue()


def as_h5() -> bytes:
    file = io.BytesIO()
    with h5py.File(file, "w") as out:
        out["train/data"] = ((GREY.reshape(N, -1) + 0.5) / 255).clip(0, 1).astype(np.float32)
        out["train/target"] = LABELS.astype(np.int32)
    return file.getvalue()


def as_mat(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> bytes:
    return as_saved(lambda file: savemat(file, {"X": x, "y": y}, do_compression=True))


PNGS = {f"mnist_m_train/{i}.png": as_png(image) for i, image in enumerate(COLOUR)}
LIST = "".join(f"{i}.png {label}\n" for i, label in enumerate(LABELS)).encode()
TEN, HUNDRED = LABELS[:, None], np.stack([LABELS * 0 + 7, LABELS], 1)
FLAT = COLOUR.reshape(N, -1)
BATCH = {"data": FLAT, "labels": LABELS.tolist(), "fine_labels": LABELS.tolist()}


@dataclass(frozen=True)
class Case:
    """A good file and how to read it."""

    content: bytes
    read: Callable[[Path], Any]
    x: np.ndarray[Any, Any]


CASES = {
    "idx": Case(as_idx(GREY[:, 0]), lambda p: (formats.idx(p, (N, 16, 16))[:, None], LABELS), GREY),
    "idx.gz": Case(
        gzip.compress(as_idx(GREY[:, 0])),
        lambda p: (formats.idx(p, (N, 16, 16))[:, None], LABELS),
        GREY,
    ),
    "cifar10.bin": Case(
        np.hstack([TEN, FLAT]).astype(np.uint8).tobytes(),
        lambda p: formats.cifar_binary(p, N, 10),
        COLOUR,
    ),
    "cifar100.bin": Case(
        np.hstack([HUNDRED, FLAT]).astype(np.uint8).tobytes(),
        lambda p: formats.cifar_binary(p, N, 100),
        COLOUR,
    ),
    "cifar10.pickle": Case(
        as_python2_pickle(BATCH), lambda p: formats.cifar_pickle(p, N, 10), COLOUR
    ),
    "cifar100.pickle": Case(
        pickle.dumps(BATCH, 3), lambda p: formats.cifar_pickle(p, N, 100), COLOUR
    ),
    "svhn.mat": Case(
        as_mat(COLOUR.transpose(2, 3, 1, 0), np.where(LABELS == 0, 10, LABELS)[:, None]),
        lambda p: formats.svhn(p, N),
        COLOUR,
    ),
    "usps.h5": Case(as_h5(), lambda p: formats.usps_h5(p, "train", N), GREY),
    "usps.bz2": Case(bz2.compress(as_text()), lambda p: formats.usps_text(p, N), GREY),
    "mnist_m.tar.gz": Case(
        as_tar(
            {"mnist_m/mnist_m_train_labels.txt": LIST}
            | {f"mnist_m/{n}": c for n, c in PNGS.items()},
            "w:gz",
        ),
        lambda p: mnist_m.mnist_m(p, "train", N, None),
        COLOUR,
    ),
    "arrays.npz": Case(
        as_saved(lambda f: np.savez(f, x=COLOUR, y=LABELS)),
        lambda p: formats.npz(p, ("x", "y")),
        COLOUR,
    ),
}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("formats")


def read(case: Case, content: bytes, folder: Path) -> Any:
    path = folder / "file"
    path.write_bytes(content)
    return case.read(path)


def refuse(
    case: Case, content: bytes, folder: Path, match: str = "file is missing, damaged or not"
) -> None:
    with pytest.raises(InputError, match=match) as caught:
        read(case, content, folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", CASES)
def test_what_was_written_is_read(name: str, scratch: Path) -> None:
    x, y = read(CASES[name], CASES[name].content, scratch)
    assert x.dtype == np.uint8
    assert np.array_equal(x, CASES[name].x)
    assert np.array_equal(y, LABELS)


@pytest.mark.parametrize("name", CASES)
def test_a_file_that_is_not_there_is_named(name: str, scratch: Path) -> None:
    with pytest.raises(InputError, match="nowhere"):
        CASES[name].read(scratch / "nowhere")
    with pytest.raises(InputError, match="formats"):
        CASES[name].read(scratch)


@pytest.mark.parametrize("name", CASES)
def test_an_empty_file_is_refused(name: str, scratch: Path) -> None:
    refuse(CASES[name], b"", scratch)


@pytest.mark.parametrize("name", CASES)
def test_half_a_file_is_refused(name: str, scratch: Path) -> None:
    refuse(CASES[name], CASES[name].content[: len(CASES[name].content) // 2], scratch)


@settings(max_examples=60, deadline=None)
@given(
    start=st.sampled_from([b"", *(case.content[:40] for case in CASES.values())]),
    noise=st.binary(max_size=400),
)
@pytest.mark.parametrize("name", CASES)
def test_random_bytes_end_in_one_line(name: str, start: bytes, noise: bytes, scratch: Path) -> None:
    refuse(CASES[name], start + noise, scratch)


@settings(max_examples=60, deadline=None)
@given(at=st.floats(0, 1, exclude_max=True), noise=st.binary(min_size=1, max_size=8))
@pytest.mark.parametrize("name", CASES)
def test_a_damaged_file_is_read_or_refused_and_nothing_else(
    name: str, at: float, noise: bytes, scratch: Path
) -> None:
    content = CASES[name].content
    place = int(at * len(content))
    with contextlib.suppress(InputError):
        read(CASES[name], content[:place] + noise + content[place + len(noise) :], scratch)


def test_an_idx_file_of_another_shape_count_or_kind_is_refused(tmp_path: Path) -> None:
    case = CASES["idx"]
    refuse(case, as_idx(GREY[:-1, 0]), tmp_path, r"shape is \(5, 16, 16\), not \(6, 16, 16\)")
    refuse(case, as_idx(LABELS), tmp_path, "begins with 00000801, not 00000803")
    refuse(case, case.content + b"\0", tmp_path, "more than")
    refuse(case, gzip.compress(bytes(10**7)), tmp_path, "more than")


def test_an_idx_file_is_told_by_its_checksum_and_its_labels(tmp_path: Path) -> None:
    path = tmp_path / "labels"
    path.write_bytes(as_idx(LABELS))
    with pytest.raises(InputError, match="md5"):
        formats.idx(path, (N,), "0" * 32)
    with pytest.raises(InputError, match=r"labels outside 1\.\.26"):
        formats.idx(path, (N,), labels=(1, 26))


def test_labels_out_of_range_are_refused(tmp_path: Path) -> None:
    refuse(
        CASES["cifar10.bin"],
        np.hstack([TEN + 1, FLAT]).astype(np.uint8).tobytes(),
        tmp_path,
        "labels outside",
    )
    refuse(
        CASES["cifar10.pickle"],
        pickle.dumps(BATCH | {"labels": [-1] * N}, 3),
        tmp_path,
        "labels outside",
    )
    refuse(
        CASES["cifar10.pickle"],
        pickle.dumps(BATCH | {"labels": ["a"] * N}, 3),
        tmp_path,
        "not a list of numbers",
    )
    refuse(
        CASES["svhn.mat"],
        as_mat(COLOUR.transpose(2, 3, 1, 0), LABELS[:, None]),
        tmp_path,
        "labels outside",
    )
    refuse(CASES["usps.bz2"], as_text(sign="-"), tmp_path, "labels outside")


def test_a_pickle_of_the_wrong_things_is_refused(tmp_path: Path) -> None:
    wrongs: list[Any] = [
        [1],
        {"labels": []},
        BATCH | {"data": FLAT.astype(float)},
        BATCH | {"data": FLAT[:2]},
        BATCH | {"labels": [1]},
    ]
    for wrong in wrongs:
        refuse(CASES["cifar10.pickle"], pickle.dumps(wrong, 3), tmp_path)


class Hostile:
    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


@pytest.mark.parametrize("call", [os.system, eval, exec, getattr, __import__])
@pytest.mark.parametrize("protocol", range(6))
def test_a_hostile_pickle_is_refused_and_does_nothing(
    call: Callable[..., Any], protocol: int, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    hostile = BATCH | {
        "labels": Hostile(
            call, f"open({str(mark)!r}, 'w')" if call is not os.system else f"touch {mark}"
        )
    }
    refuse(
        CASES["cifar10.pickle"],
        pickle.dumps(hostile, protocol),
        tmp_path,
        "which no data file needs",
    )
    assert not mark.exists()


def test_a_pickle_that_asks_for_room_without_end_is_refused(tmp_path: Path) -> None:
    refuse(
        CASES["cifar10.pickle"],
        b"\x80\x02]r\xff\xff\xff\xff.",
        tmp_path,
        "4,294,967,295",
    )


def test_an_svhn_file_of_another_shape_or_size_is_refused(tmp_path: Path) -> None:
    y = np.ones((N, 1))
    refuse(CASES["svhn.mat"], as_mat(COLOUR, y), tmp_path, "not uint8")
    refuse(
        CASES["svhn.mat"],
        as_mat(COLOUR.transpose(2, 3, 1, 0).astype(float), y),
        tmp_path,
        "X is double",
    )
    refuse(
        CASES["svhn.mat"],
        as_mat(COLOUR.transpose(2, 3, 1, 0), y[:-1]),
        tmp_path,
        r"labels \(5, 1\)",
    )
    with pytest.raises(InputError, match="at most 5"):
        read(
            Case(b"", lambda path: formats.svhn(path, 5), COLOUR),
            CASES["svhn.mat"].content,
            tmp_path,
        )


def test_without_h5py_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    refuse(CASES["usps.h5"], b"", tmp_path, r"feddkd\[data\]")


def test_mnist_m_is_the_same_from_a_folder_and_from_a_tar(tmp_path: Path) -> None:
    labels, folder, archive = (
        tmp_path / "labels.txt",
        tmp_path / "mnist_m_train",
        tmp_path / "train.tar",
    )
    labels.write_bytes(LIST)
    archive.write_bytes(as_tar(PNGS))
    folder.mkdir()
    for name, content in PNGS.items():
        (tmp_path / name).write_bytes(content)
    for path in (folder, archive):
        x, y = mnist_m.mnist_m(path, "train", N, labels)
        assert np.array_equal(x, COLOUR)
        assert np.array_equal(y, LABELS)


@pytest.mark.parametrize(
    "text",
    [
        b"../secret.png 1",
        b"0.png",
        b"0.png x",
        b"0.png 10",
        b"\xff",
        b"absent.png 1",
        b"",
        b"0.png 1\n" * 7,
    ],
)
def test_a_list_of_labels_that_makes_no_sense_is_refused(text: bytes, tmp_path: Path) -> None:
    labels, archive = tmp_path / "labels.txt", tmp_path / "train.tar"
    labels.write_bytes(text)
    archive.write_bytes(as_tar(PNGS))
    with pytest.raises(InputError):
        mnist_m.mnist_m(archive, "train", N, labels)


def test_links_in_a_tar_are_not_followed(tmp_path: Path) -> None:
    path, secret = tmp_path / "train.tar", tmp_path / "secret.png"
    secret.write_bytes(PNGS["mnist_m_train/0.png"])
    with tarfile.open(path, "w") as archive:
        member = tarfile.TarInfo("mnist_m_train/0.png")
        member.type, member.linkname = tarfile.SYMTYPE, str(secret)
        archive.addfile(member)
    (tmp_path / "labels.txt").write_bytes(b"0.png 1")
    with pytest.raises(InputError, match=r"0\.png"):
        mnist_m.mnist_m(path, "train", N, tmp_path / "labels.txt")


def test_an_archive_that_unpacks_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mnist_m, "LARGEST_ARCHIVE", 1000)
    monkeypatch.setattr(formats, "LARGEST", 1000)
    refuse(
        CASES["mnist_m.tar.gz"], CASES["mnist_m.tar.gz"].content, tmp_path, "unpack to more than"
    )
    refuse(CASES["arrays.npz"], CASES["arrays.npz"].content, tmp_path, "it unpacks to")


def test_an_npz_of_objects_or_without_the_names_is_refused(tmp_path: Path) -> None:
    objects = as_saved(lambda file: np.savez(file, x=np.array([{}]), y=LABELS))
    refuse(CASES["arrays.npz"], objects, tmp_path, "allow_pickle")
    refuse(
        CASES["arrays.npz"],
        as_saved(lambda file: np.savez(file, z=LABELS)),
        tmp_path,
        "holds z.* x, y",
    )
