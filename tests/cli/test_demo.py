"""feddkd demo."""

from pathlib import Path

import pytest

from commandline import Feddkd
from feddkd.cli import demo
from feddkd.experiment import load


def test_the_demo_writes_runs_and_their_report(
    feddkd: Feddkd, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(load(demo.EXPERIMENT)) == 15
    monkeypatch.setattr(demo, "EXPERIMENT", Path("tiny.toml"))
    done = feddkd("demo", "--out", "here")
    assert done.status == 0
    assert "here/report.html" in done.err
    assert Path("here/report.html").stat().st_size > 10_000
    assert list(Path("here").glob("*/final.safetensors"))
