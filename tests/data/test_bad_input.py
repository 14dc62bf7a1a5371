"""Whatever a user hands in is used or refused: one clear line, exit status 2, nothing half-written.

What one reader refuses is tested beside it (test_formats.py, test_spelling.py, test_experiment.py,
...); this file reads it as a user does.
"""

import json
import os
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commandline import Done, Feddkd
from feddkd.data.sources.formats import CIFAR
from fuzz import by_hypothesis, targets

IMAGES = np.random.default_rng(0).integers(0, 256, (60, 1, 8, 8)).astype(np.uint8)
GOOD: dict[str, Any] = {
    "x_train": IMAGES,
    "y_train": np.arange(60) % 3,
    "x_test": IMAGES[:12],
    "y_test": np.arange(12) % 3,
}
FLOATS = {"x_train": IMAGES / 255, "x_test": IMAGES[:12] / 255}


def refused(done: Done, says: str) -> None:
    assert done.status == 2, done.err
    assert re.fullmatch(r"feddkd: .+\n", done.err)
    assert says in done.err
    assert done.out == ""
    assert not Path("runs").exists()


def run(feddkd: Feddkd, *settings: str) -> Done:
    return feddkd(
        "run",
        "tiny.toml",
        "--engine",
        "serial",
        *(word for setting in settings for word in ("--set", setting)),
    )


# --- data


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({**FLOATS, "x_train": np.where(IMAGES.max() == IMAGES, np.nan, IMAGES / 255)}, "NaN"),
        ({**FLOATS, "x_test": np.full((12, 1, 8, 8), np.inf)}, "infinite"),
        (
            {"x_train": IMAGES.astype(np.int32), "x_test": IMAGES[:12].astype(np.int32)},
            "or floating point, not torch.int32",
        ),
        ({"x_train": IMAGES.astype(complex), "x_test": IMAGES[:12].astype(complex)}, "complex128"),
        ({"x_train": IMAGES.astype(str)}, "an array of <U3"),
        ({"x_train": IMAGES[:, 0, 0, 0]}, "not (60,)"),
        (
            {"x_train": IMAGES.transpose(0, 2, 3, 1), "x_test": IMAGES[:12].transpose(0, 2, 3, 1)},
            "(N, C, H, W)",
        ),
        ({"x_test": IMAGES[:12, :, :7, :7]}, "must be alike"),
        ({"x_train": IMAGES[:0], "y_train": np.arange(0)}, "empty"),
        ({"x_test": IMAGES[:0], "y_test": np.arange(0)}, "empty"),
        ({"y_train": np.arange(60) - 1}, "these are in -1..58"),
        ({"y_train": np.full(60, 10**9)}, "0..99999"),
        ({"y_train": np.arange(60) / 7}, "targets must be alike"),
        ({"y_train": np.arange(59)}, "60 examples need labels of shape (60,), not (59,)"),
        (
            {"x_train": IMAGES[:4], "y_train": np.arange(4)},
            "4 training examples",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arrays_that_make_no_sense(feddkd: Feddkd, changes: dict[str, Any], says: str) -> None:
    np.savez("own.npz", allow_pickle=True, **{**GOOD, **changes})
    refused(run(feddkd, "data=npz(path='own.npz')", "partition=iid()", "validation=0"), says)


@pytest.mark.parametrize(
    "damage",
    [
        lambda c: c[: len(c) // 2],
        lambda c: b"",
        lambda c: c[:300] + b"???" + c[303:],
        lambda c: b"hello",
    ],
)
def test_damaged_arrays(feddkd: Feddkd, damage: Callable[[bytes], bytes]) -> None:
    np.savez("own.npz", allow_pickle=False, **GOOD)
    Path("own.npz").write_bytes(damage(Path("own.npz").read_bytes()))
    refused(run(feddkd, "data=npz(path='own.npz')"), "own.npz is missing, damaged or not")


class Hostile:
    """An object that makes a folder when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("pwned",)


def test_a_hostile_pickle_in_a_data_file_is_not_run(feddkd: Feddkd) -> None:
    np.savez(
        "own.npz", allow_pickle=True, **{**GOOD, "x_train": np.array([Hostile()] * 60, object)}
    )
    refused(run(feddkd, "data=npz(path='own.npz')"), "own.npz")
    refused(run(feddkd, "partition=saved(path='own.npz')"), "own.npz")
    Path("own.pkl").write_bytes(pickle.dumps(Hostile()))
    refused(run(feddkd, "partition=saved(path='own.pkl')"), "own.pkl: it holds no lists")
    Path("cifar-10-batches-py").mkdir()
    Path("cifar-10-batches-py/data_batch_1").write_bytes(
        pickle.dumps(
            {"data": np.zeros((10_000, *CIFAR), np.uint8).reshape(10_000, -1), "labels": Hostile()}
        )
    )
    refused(
        feddkd("run", "tiny.toml", "--set", "data=cifar10", "--data", "."),
        "mkdir, which no data file needs",
    )
    assert not Path("pwned").exists()


def test_one_class_is_little_but_no_mistake(feddkd: Feddkd) -> None:
    np.savez(
        "own.npz",
        allow_pickle=False,
        **{**GOOD, "y_train": np.zeros(60, int), "y_test": np.zeros(12, int)},
    )
    assert run(feddkd, "data=npz(path='own.npz')", "partition=iid()", "rounds=1").status == 0


# --- values


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        (
            "clients=1000000000000",
            "1000000000000 clients",
        ),
        (
            "partition=shards(per_client=10000000000)",
            "50000000000 shards cannot be cut from 1295 examples",
        ),
        ("partition=dirichlet(minimum=1000000)", "lower the minimum"),
        ("data=generated_digits(train=100000000000)", "train must be >= 1 and <= 1e+06"),
        (
            "model=mlp(hidden='99999999999')",
            "build mlp(hidden='99999999999')",
        ),
        ("transform=pad(pixels=1000000000)", "cannot load digits"),
        ("validation=0.999", "take fewer clients"),
        ("method=fedavg(lr=-0.1)", "lr must be > 0, not -0.1"),
        ("method=fedavg(lr=1e400)", "lr must be a finite number"),
        ("method=fedavg(epochs=1.5)", "epochs must be a whole number"),
        ("seed=99999999999999999999", "seed must fit into 64 bits"),
        ("cohort=nan", "cohort must be a finite number"),
        ("delta=1", "delta must be > 0 and < 1"),
    ],
)
def test_absurd_values(feddkd: Feddkd, setting: str, says: str) -> None:
    refused(run(feddkd, setting), says)


def test_what_shows_only_when_all_is_ready_leaves_no_folder_either(
    feddkd: Feddkd, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(run(feddkd, "method=feddf()"), "reads public data, and there is none")
    refused(feddkd("run", "tiny.toml", "--strategy", "brute"), "unknown strategy 'brute'")
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    refused(run(feddkd, "method=fedavg(clip=1.0, noise=1.0)"), "pip install 'feddkd[privacy]'")


# --- places

ODD = [
    "with space",
    "ünï✓cödé",
    "new\nline",
    "quo'te",
    'quo"te',
    "-dash",
    "[bold]",
    "$HOME",
    "%s",
    "a|b",
]


@pytest.mark.parametrize("name", ODD)
def test_odd_names_are_names_like_any_other(feddkd: Feddkd, name: str) -> None:
    np.savez(f"{name}.npz", allow_pickle=False, **GOOD)
    data = f"npz(path={name + '.npz'!r})"
    text = f"{Path('tiny.toml').read_text()}data = {json.dumps(data)}\n"
    Path(f"{name}.toml").write_text(
        text.replace("classes(per_client=2)", "iid()").replace("rounds = 2", "rounds = 1")
    )
    done = feddkd("run", "--engine", "serial", "--out", name, "--", f"{name}.toml")
    assert done.status == 0, done.err
    assert feddkd("report", "--", name).status == 0
    refused(
        feddkd("run", "--out", "runs", "--", f"{name} not there.toml"),
        "not there.toml: No such file",
    )


@pytest.mark.parametrize(
    "place", ["tiny.toml", "tiny.toml/below", "/proc/nowhere", "/dev/null/x", "a" * 300, "loop/x"]
)
@pytest.mark.parametrize(
    "line",
    [
        "run tiny.toml --engine serial --out",
        "data pack tiny.toml --out",
        "data show tiny.toml --save",
    ],
)
def test_places_where_nothing_can_be_written(feddkd: Feddkd, line: str, place: str) -> None:
    os.symlink("loop", "loop")
    before = {path: path.read_bytes() for path in Path().iterdir() if path.is_file()}
    if line.endswith("--save") and place == "tiny.toml":
        place = "tiny.toml/x.npz"  # a file may be written over
    done = feddkd(*line.split(), place)
    refused(done._replace(out=""), place[:40])
    assert {path: path.read_bytes() for path in Path().iterdir() if path.is_file()} == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(feddkd: Feddkd) -> None:
    Path("locked").mkdir(mode=0o500)
    refused(feddkd("run", "tiny.toml", "--out", "locked"), "locked")


# --- anything at all


@pytest.mark.parametrize(
    "name",
    ["experiment loader", "method parser", "reader of arrays.npz", "reader of cifar10.pickle"],
)
def test_damaged_input_is_read_or_refused_and_nothing_else(name: str) -> None:
    tried = by_hypothesis(targets()[name], 100)
    assert tried.accepted + tried.refused >= 100
    assert tried.refused
