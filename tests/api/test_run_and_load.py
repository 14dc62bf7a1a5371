"""`feddkd.run` and `feddkd.load`: experiments from Python, with records, and what is read back."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import feddkd
from commandline import TINY, Feddkd
from damaged import unseal
from feddkd import Experiment, InputError
from feddkd.errors import RunError
from feddkd.runs import signals
from small import clients, network, pooled


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDDKD_DATA", raising=False)
    Path("tiny.toml").write_text(TINY)
    return tmp_path


def tiny(**changes: Any) -> Experiment:
    method = "fedavg(epochs=1, batch_size=32)"
    plain = {"method": method, "clients": 4, "rounds": 2, "model": "mlp(hidden='8')", **changes}
    return Experiment(**plain)


def test_run_writes_the_records_of_the_command_line(feddkd: Feddkd) -> None:
    import feddkd as package

    feddkd("run", "tiny.toml", "--out", "a", "--engine", "serial")
    (run,) = package.run("tiny.toml", "b", engine="serial")
    (other,) = package.load("a")
    assert run.folder.name == other.folder.name
    assert (run.folder / "rounds.jsonl").read_bytes() == (
        other.folder / "rounds.jsonl"
    ).read_bytes()
    assert run.history == other.history
    without = {key: value for key, value in run.summary.items() if key != "seconds"}
    assert without == {key: value for key, value in other.summary.items() if key != "seconds"}


def test_a_list_may_hold_experiments_and_files_and_keeps_its_order() -> None:
    runs = feddkd.run([tiny(seed=3), "tiny.toml", tiny(seed=1)], "out", engine="serial")
    assert len(runs) == 3
    assert [run.manifest["canonical"]["seed"] for run in runs] == [3, 0, 1]
    assert runs[0].experiment == tiny(seed=3)
    assert [run.folder.name for run in runs[1:]] == [runs[1].folder.name, runs[2].folder.name]
    assert len(feddkd.load("out")) == 3


def test_finished_runs_are_left_alone_and_half_runs_are_continued() -> None:
    half = feddkd.run(tiny(), until=1, engine="serial")
    assert len(half[0].history) == 1
    assert half[0].summary["rounds"] == 1
    with pytest.raises(InputError, match="not finished"):
        half[0].state_dict()
    whole = feddkd.run(tiny(), engine="serial")
    assert len(whole[0].history) == 2
    before = (whole[0].folder / "manifest.json").stat().st_mtime_ns
    feddkd.run(tiny(), engine="serial")
    assert (whole[0].folder / "manifest.json").stat().st_mtime_ns == before


def test_a_run_that_cannot_go_on_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match="1 of 2 runs could not go on"):
        feddkd.run([tiny(method="fedavg(lr=1e30)", on_divergence="stop"), tiny()], "out")
    assert len(feddkd.load("out")) == 1


@pytest.mark.parametrize("given", [[], 7, "nowhere.toml", None])
def test_what_is_no_experiment_is_refused(given: Any) -> None:
    with pytest.raises(InputError):
        feddkd.run(given)


def test_a_stop_by_a_signal_is_a_keyboard_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals.Halt, "__enter__", lambda _: types.SimpleNamespace(asked=2))
    with pytest.raises(KeyboardInterrupt, match="after round 1"):
        feddkd.run(tiny(), engine="serial")
    assert len(feddkd.load("runs")[0].history) == 1


def test_what_is_loaded_is_what_was_run() -> None:
    (run,) = feddkd.run(tiny(target=0.01), engine="serial")
    assert run.summary["to_target"]["round"] == 1
    assert run.experiment == tiny(target=0.01)
    weights = run.state_dict()
    assert {name: tensor.dtype for name, tensor in weights.items()}
    assert all(isinstance(tensor, torch.Tensor) for tensor in weights.values())
    assert "fedavg(epochs=1, batch_size=32)" in repr(run)
    assert "to 1 %" in repr(feddkd.load("runs"))
    assert "<table>" in feddkd.load("runs")._repr_html_()
    assert len(feddkd.load("runs")[:0]) == 0
    assert repr(feddkd.load("runs")[:0])


def test_a_record_of_simulate_is_loaded_and_has_no_experiment() -> None:
    data = clients()
    result = feddkd.simulate(
        model=network(), clients=data, test=pooled(data), method="fedavg()", out="mine/net"
    )
    (run,) = feddkd.load("mine")
    assert run.history == result.history
    assert run.experiment is None
    network().load_state_dict(run.state_dict())


def test_the_command_line_shows_records_of_simulate(feddkd: Feddkd) -> None:
    import feddkd as package

    data = clients()
    how: dict[str, Any] = {"model": network(), "clients": data, "test": pooled(data)}
    package.simulate(**how, method="fedavg()", out="runs/one")
    package.simulate(**how, method="fedavg() | dkd(steps=1)", rounds=3, out="runs/two",
                     on_round=lambda row: True)  # fmt: skip
    assert "fedavg | dkd" in feddkd("report").out
    entries = json.loads(feddkd("ls", "--json").out.splitlines()[-1])["runs"]
    assert [entry["state"] for entry in entries] == ["finished", "stopped"]
    assert feddkd("report", "--out", "page.html").status == 0
    done = feddkd("compare", "runs/one", "runs/two")
    assert (done.status, "rounds" in done.out) == (0, True), done.err
    assert feddkd("resume", "runs/two").status == 0  # it is over
    unseal(Path("runs/two"))
    manifest = Path("runs/two/manifest.json")
    manifest.write_text(manifest.read_text().replace('"stopped"', '"not stopped"'))
    done = feddkd("resume", "runs/two")
    assert (done.status, "simulate()" in done.err) == (2, True)


def test_rows_become_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    feddkd.run(tiny(), engine="serial")
    feddkd.run(tiny(seed=1, diagnostics=True), engine="serial")
    runs = feddkd.load("runs")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match="pip install pandas"):
        runs.to_frame()
    monkeypatch.setitem(sys.modules, "pandas", types.SimpleNamespace(DataFrame=list))
    rows = runs.to_frame()
    assert [(row["seed"], row["round"]) for row in rows] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert any(key.startswith("diagnostics/") for key in rows[-1])
    assert "diagnostics" not in rows[-1]
    assert runs[0].to_frame() == runs[0].history
