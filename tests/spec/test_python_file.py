"""`model` and `data` as functions in a user's own Python file."""

import json
from pathlib import Path
from typing import Any

import pytest

from commandline import Feddkd
from feddkd import Experiment, InputError
from feddkd.experiment import load
from feddkd.flower import node_experiment
from feddkd.flower.node_data import NodeConfig
from feddkd.flower.wire import WireError
from feddkd.runs.prepare import prepare

NETS = """
from torch import nn

print("the file is run")

def plain(hidden=8):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))

def fitting(shape, classes, hidden=8):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, classes))

def late(**options):
    return lambda shape, classes: fitting(shape, classes, **options)

def number():
    return 7

def broken():
    raise KeyError("oops")
"""
DATA = """
import numpy as np

def waves(n=60):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(n, 64)).astype("float32"), np.arange(n) % 3
    return (x, y), (x[:30], y[:30])

def text():
    return "no data"
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(NETS)
    Path("waves.py").write_text(DATA)
    return tmp_path


def make(**changes: Any) -> Experiment:
    return Experiment(
        **{"method": "fedavg()", "clients": 2, "partition": "iid()", "rounds": 1, **changes}
    )


@pytest.mark.parametrize("name", ["plain", "fitting(hidden=8)", "late(hidden=8)"])
def test_a_function_builds_the_network_under_the_seed(files: Path, name: str) -> None:
    model = prepare(make(model=f"nets.py:{name}"), None).model
    again = prepare(make(model=f"nets.py:{name}"), None).model
    other = prepare(make(model=f"nets.py:{name}", seed=1), None).model
    weight, same, different = (one.start()[0]["1.weight"] for one in (model, again, other))
    assert weight.shape == (8, 64)
    assert (weight == same).all()
    assert (weight != different).any()


def test_a_function_returns_the_data(files: Path) -> None:
    data = prepare(make(data="waves.py:waves(n=90)", model="mlp"), None).data
    assert (len(data.train), len(data.test), data.classes) == (90, 30, 3)


def test_the_digest_follows_the_content_and_not_the_path(files: Path) -> None:
    first = make(model="nets.py:plain(hidden=8)")
    Path("copy.py").write_text(NETS)
    assert make(model="copy.py:plain( hidden=8 )").digest == first.digest
    assert make(model="nets.py:plain(hidden=9)").digest != first.digest
    assert make(model="nets.py:fitting(hidden=8)").digest != first.digest
    Path("nets.py").write_text(NETS + "\n")
    assert make(model="nets.py:plain(hidden=8)").digest != first.digest


def test_making_an_experiment_runs_nothing(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("loud.py").write_text("print('the file is run')\nraise SystemExit\n")
    make(model="loud.py:f", data="loud.py:g(n=3)")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "nowhere.py:plain"}, "cannot read nowhere.py"),
        ({"model": "nets.py:nothing"}, "no function 'nothing'"),
        ({"model": "nets.py:plain(hiden=3)"}, "hiden"),
        ({"model": "nets.py:number"}, "must return a torch.nn.Module, not int"),
        ({"model": "nets.py:broken"}, "KeyError: 'oops'.*nets.py, line"),
        ({"model": "nets.py:plain() | plain()"}, "one model"),
        ({"model": "nets.py:plain(8)"}, "cannot read the model"),
        ({"data": "waves.py:text"}, "a pair .* not str"),
        ({"data": "nets.py:plain"}, "a pair .* not Sequential"),
    ],
)
def test_a_mistake_is_named(files: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        prepare(make(**changes), None)


def test_a_toml_file_may_name_files_and_a_run_is_resumed(files: Path, feddkd: Feddkd) -> None:
    Path("nets.py").write_text(NETS)
    Path("waves.py").write_text(DATA)
    text = "method='fedavg()'\nmodel='nets.py:plain'\ndata='waves.py:waves(n=90)'\n"
    Path("own.toml").write_text(text + "clients=3\nrounds=2\npartition='iid()'\n")
    done = feddkd("run", "own.toml", "--json")
    assert done.status == 0, done.err
    (run,) = json.loads(done.out.splitlines()[-1])["runs"]
    assert run["digest"] == load(Path("own.toml"))[0].digest
    Path("nets.py").write_text(NETS + "# changed\n")
    done = feddkd("resume", "runs")
    assert (done.status, "has changed" in done.err) == (2, True)


def test_a_flower_server_cannot_make_a_node_run_a_file(files: Path) -> None:
    spelled = json.dumps(make(model="nets.py:plain").as_dict())
    with pytest.raises(WireError, match="Python file"):
        node_experiment._open(NodeConfig(0, 1), spelled, "{}")
