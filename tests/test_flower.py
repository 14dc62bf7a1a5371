"""Flower's nodes give what `serial` gives, and whatever goes wrong with one of them, the round goes on with the rest."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

pytest.importorskip("flwr")

from feddkd import Experiment
from feddkd.execute import execute
from feddkd.flower.apps import NodeApp, serve
from feddkd.record import find
from flower_double import Double

LOCAL = "epochs=1, batch_size=32, lr=0.1"
METHODS = [f"fedavg({LOCAL})", f"fedbn({LOCAL})", f"scaffold({LOCAL})", f"fedgen({LOCAL}, generator_steps=2)"]
DKD = "dkd(steps=2, batch_size=16, lr=0.3)"
SETTING: dict[str, Any] = {
    "data": "digits", "partition": "dirichlet(alpha=1)", "model": "mlp(hidden='8')", "clients": 3, "cohort": 2, "rounds": 2,
    "training": 0.2, "dtype": "float64", "seed": 3,
}  # fmt: skip


def final(folder: Path) -> dict[str, Tensor]:
    (record,) = find(folder)
    return load_file(record.folder / "final.safetensors")


def rows(folder: Path) -> list[dict[str, Any]]:
    (record,) = find(folder)
    return record.history


def flower(folder: Path, method: str, grid: Double | None = None, **changes: Any) -> Double:
    grid = grid or Double(NodeApp(), SETTING["clients"])
    spelled = {f"experiment.{key}": value for key, value in {**SETTING, "method": method, **changes}.items()}
    serve(grid, {**spelled, "out": str(folder), "poll": 0.0, "deadline": 0.2, "join": 0.2})
    return grid


def serial(folder: Path, method: str, **changes: Any) -> None:
    execute([Experiment(**{**SETTING, "method": method, **changes})], out=folder, engine="serial")


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert set(a) == set(b)
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize("then", ["", f" | {DKD}"], ids=["alone", "with dkd"])
@pytest.mark.parametrize("method", METHODS)
def test_flower_gives_what_serial_gives(method: str, then: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"model": "emnist_cnn", "transform": "pad(pixels=10)"} if "fedbn" in method else {}
    serial(tmp_path / "serial", method + then, **changes)
    flower(tmp_path / "flower", method + then, **changes)
    assert apart(final(tmp_path / "serial"), final(tmp_path / "flower")) < 1e-12
    for expected, found in zip(rows(tmp_path / "serial"), rows(tmp_path / "flower"), strict=True):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, abs=1e-10), key
