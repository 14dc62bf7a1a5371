"""`feddkd run` with an engine's options:

what is printed meanwhile, and in which arithmetic runs compute.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from feddkd.cli.app import main

TINY = """
method = "fedavg(epochs=1, batch_size=32) | dkd(steps=2)"
model = "mlp(hidden='8')"
clients = 4
rounds = 1
"""


@pytest.fixture
def feddkd(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Any:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(TINY, encoding="utf-8")

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(
            sys, "argv", ["feddkd", "run", "tiny.toml", "--engine", "batched", *words]
        )
        with pytest.raises(SystemExit) as caught:
            main()
        return int(caught.value.code or 0), *capfd.readouterr()

    return call


def manifest() -> dict[str, Any]:
    (path,) = Path("runs").rglob("manifest.json")
    read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return read


def test_strategy_and_memory_plan_are_told_on_standard_error_and_recorded(feddkd: Any) -> None:
    status, _, err = feddkd()
    lines = err.splitlines()
    assert status == 0
    assert sum(line == "local, 4 lanes of 32: begins with loop" for line in lines) == 1
    assert (
        sum(
            line.startswith("local, batches of 32: 4 lanes at once (a lane takes ")
            for line in lines
        )
        == 1
    )
    assert sum(line.startswith("distil, 1 x 4 clients of 64: ") for line in lines) == 1
    assert not any("evaluate" in line for line in lines)
    engine = manifest()["engine"]
    assert any(line.startswith("local, batches of 32") for line in engine["memory"])
    assert engine["strategy"]["local, 4 lanes of 32"] == "loop"
    assert engine["since"] == {}, "there was no time for a trial"


def test_with_json_nothing_is_told_and_standard_output_is_one_object(feddkd: Any) -> None:
    status, out, err = feddkd("--json")
    assert status == 0
    assert len(json.loads(out)["runs"]) == 1
    assert "lanes" not in err


def test_fp64_is_the_experiments_dtype_and_recorded_so(feddkd: Any) -> None:
    assert feddkd("--precision", "fp64", "--json")[0] == 0
    told = manifest()
    assert (told["experiment"]["dtype"], told["canonical"]["dtype"]) == ("float64", "float64")
    assert feddkd("--set", "dtype=float64", "--json")[0] == 0
    assert manifest()["digest"] == told["digest"]


@pytest.mark.parametrize("engine", ["serial", "pool", "auto"])
def test_fp64_and_fp32_are_every_engines_on_a_cpu(feddkd: Any, engine: str) -> None:
    assert feddkd("--engine", engine, "--precision", "fp64", "--json")[0] == 0
    assert feddkd("--engine", engine, "--precision", "fp32", "--json")[0] == 0


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--precision fp8", "unknown precision 'fp8'; there are: bf16, fp32, fp64, tf32"),
        ("--precision tf32", "precision 'tf32' needs a GPU"),
        (
            "--precision bf16 --engine serial",
            "engine 'serial' computes in the experiment's dtype and knows no precision 'bf16'",
        ),
        (
            "--precision bf16 --set dtype=float64",
            "precision 'bf16' is for experiments of dtype float32",
        ),
        (
            "--precision fp64 --set sweep.dtype=['float32','float64']",
            "they differ in their dtype alone",
        ),
    ],
)
def test_a_precision_that_makes_no_sense_is_refused_in_one_line(
    feddkd: Any, words: str, complaint: str
) -> None:
    status, _, err = feddkd(*words.split())
    assert status == 2
    assert complaint in err
    assert err.count("\n") == 1
