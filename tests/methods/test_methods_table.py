"""The table of all methods: what it says is what was run, and nothing is run twice."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from feddkd import METHODS
from feddkd.method import Collect, Method
from feddkd.methods.local import Local, Variant, local_training

SCRIPT = Path(__file__).parents[2] / "tools" / "measure" / "methods.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("methods_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "methods_table", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "LOCAL", {"epochs": 1})
    return module


def cells(text: str) -> dict[str, list[str]]:
    """Method -> its line."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return {
        row[0].strip("`"): row[1:]
        for row in ([cell.strip() for cell in line[1:-1].split(" | ")] for line in lines)
    }


def test_every_method_has_a_line_with_and_without_dkd_and_nothing_is_run_twice(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [
        "fedavg",
        "fedbn",
        "--rounds",
        "1",
        "--seeds",
        "2",
        "--runs",
        str(tmp_path),
        "--out",
        str(tmp_path / "table.md"),
    ]
    script.main(arguments)
    text = (tmp_path / "table.md").read_text()
    table = cells(text)
    assert set(table) == {"fedavg", "fedbn"}
    assert all(re.fullmatch(r"\d+\.\d ± \d+\.\d", cell) for cell in table["fedavg"][:4])
    assert table["fedbn"][0] == "—"  # its batch norm is not shared
    assert table["fedavg"][4:6] == ["1", "11"]
    assert float(table["fedavg"][7]) > float(table["fedavg"][6]) > 0
    assert "2 seeds" in text
    assert f"python tools/measure/methods.py {' '.join(arguments)}" in text
    assert "fedavg(epochs=1)\nfedbn(epochs=1)\n" in text
    assert "fedavg" in capsys.readouterr().err

    def never(*_: object, **__: object) -> None:
        raise AssertionError("it was run already")

    monkeypatch.setattr(script, "execute", never)
    script.main(arguments)
    assert (tmp_path / "table.md").read_text() == text
    script.main(arguments[1:])  # fedavg is not named and keeps its line
    assert (tmp_path / "table.md").read_text() == text


def test_where_dkd_cannot_go_the_reason_stands_below(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(METHODS, "_factories", dict(METHODS._factories))

    @METHODS.register
    def hermits(local: Local) -> Method:
        """Everybody for himself."""
        sign = {"sign": {"of life": torch.ones(())}}  # an upload must hold something
        variant = Variant(
            private="model",
            part=lambda model, sent, carry, memo: (sign, {}),
            collect={"sign": Collect.EVERY},
        )
        return local_training(local, variant)

    script.main(
        [
            "hermits",
            "--rounds",
            "1",
            "--seeds",
            "1",
            "--runs",
            str(tmp_path),
            "--out",
            str(tmp_path / "table.md"),
        ]
    )
    text = (tmp_path / "table.md").read_text()
    assert [cells(text)["hermits"][at] for at in (0, 1, 3, 5, 7)] == ["—"] * 5
    assert re.search(r"\* hermits with DKD: phase 'distil' teaches a shared model", text)


def test_methods_are_spelled_with_the_jobs_options_and_pieces_go_behind_fedavg(
    script: ModuleType,
) -> None:
    assert script.spelled("fedprox") == "fedprox(epochs=1, mu=0.1)"
    assert script.spelled("dkd") == "fedavg(epochs=1) | dkd()"


def test_options_are_given_to_methods_that_there_are(script: ModuleType) -> None:
    for name, options in script.OPTIONS.items():
        assert set(options) <= set(METHODS.options(name))
