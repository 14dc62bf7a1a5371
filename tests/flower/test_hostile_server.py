"""A dishonest server learns numbers of training from a node, and nothing of its files."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Context, Message, RecordDict

from feddkd import Experiment
from feddkd.flower.apps import NodeApp
from feddkd.flower.sent_experiment import to_send
from feddkd.flower.transport import json_in, json_record
from flower_double import FEDDKD, SETTING, Double, apart, final, rows
from test_flower import flower, serial

FACTS = {"shape": [1, 8, 8], "classes": 10, "scale": 16.0}
SECRET = "patient 4711"


def load(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(4, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 0, 1])


def asked(app: NodeApp, changes: dict[str, Any], **config: Any) -> str:
    """Return what a node answers to a server that asks who it is, as one text."""
    keys = {**to_send({**SETTING, "method": FEDDKD, "clients": 1}), **changes}
    content = RecordDict({"page": json_record({"experiment": keys, "facts": FACTS})})
    grid = Double(app, 1, configs={0: config})
    (node,) = grid.get_node_ids()
    (number,) = grid.push_messages([Message(content, node, "query.info")])
    (reply,) = grid.pull_messages([number])
    return str(reply.error.reason) if reply.has_error() else str(json_in(reply))


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of the hospital beside its data folder."""
    (tmp_path / "data").mkdir()
    path = tmp_path / "secret.csv"
    path.write_text(f"{SECRET},label\n{SECRET},{SECRET}\n")
    return path


ASKED = {
    "trace": {"availability": "trace(file='{file}')"},
    "csv": {"data": "csv(path='{file}')"},
    "csv beside the folder": {"data": "csv(path='../secret.csv')"},
    "npz": {"data": "npz(path='{file}')"},
    "folder": {"data": "folder(path='{folder}')"},
    "saved": {"partition": "saved(path='{file}')"},
    "nothing there": {"data": "npz(path='{file}.none')"},
    "python data": {"data": "{file}.py:load"},
    "python network": {"model": "{file}.py:build"},
    "initial": {"initial": "{file}"},
    "a device for ever": {"partition": "saved(path='/dev/zero')"},
}


@pytest.mark.parametrize("what", ASKED)
@pytest.mark.parametrize("brings_data", [True, False])
def test_no_text_of_a_file_comes_back(what: str, brings_data: bool, secret: Path) -> None:
    (secret.parent / "secret.csv.py").write_text("raise SystemExit('it was run')")
    changes = {
        key: text.format(file=secret, folder=secret.parent) for key, text in ASKED[what].items()
    }
    app = NodeApp(load) if brings_data else NodeApp()
    answer = asked(app, changes, data=str(secret.parent / "data"))
    assert SECRET not in answer
    assert str(secret.parent) not in answer
    assert "was run" not in answer


def test_a_file_that_exists_is_answered_like_one_that_does_not(secret: Path) -> None:
    folder = str(secret.parent / "data")
    answers = {
        asked(NodeApp(), {"data": f"npz(path='{path}')"}, data=folder)
        for path in (secret, "/nowhere/at/all", "../nothing")
    }
    assert len(answers) == 1


def test_what_the_operators_own_loader_says_stays_in_the_nodes_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(context: Context) -> Any:
        raise ValueError(f"cannot read the record of {SECRET}")

    assert SECRET not in asked(NodeApp(fails), {})
    assert SECRET in caplog.text


def test_nodes_are_sent_only_what_training_needs() -> None:
    keys = Experiment(
        **{**SETTING, "method": FEDDKD, "name": "secret plan", "target": 0.9}
    ).as_dict()
    assert not {"name", "target", "availability", "initial", "rounds"} & set(to_send(keys))


# --- a network in a file that the operator of a node was given

NETWORK = """
from torch import nn

def build(shape, classes, hidden=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, classes))
"""


def test_a_network_in_a_file_is_that_of_the_nodes_own_copy(tmp_path: Path) -> None:
    for place in ("server", "node"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "net.py").write_text(NETWORK)
    model = {"model": f"{tmp_path / 'server' / 'net.py'}:build(hidden=5)"}
    serial(tmp_path / "serial", FEDDKD, **model)
    app = NodeApp(network=tmp_path / "node" / "net.py")
    flower(tmp_path / "flower", FEDDKD, Double(app, 3), **model)
    assert apart(final(tmp_path / "serial"), final(tmp_path / "flower")) < 1e-12


@pytest.mark.parametrize("given", [None, "another"])
def test_a_node_runs_no_other_network_than_the_one_it_was_given(
    given: str | None, tmp_path: Path
) -> None:
    (tmp_path / "net.py").write_text(NETWORK)
    (tmp_path / "own.py").write_text("raise SystemExit('it was run')")
    digest = hashlib.sha256(NETWORK.encode()).hexdigest()
    app = NodeApp(load, network=tmp_path / "own.py" if given else None)
    answer = asked(app, {"model": f"python:{digest}:build()"})
    assert "Python file" in answer
    assert "was run" not in answer


# --- weights to start from


@pytest.mark.parametrize("method", ["fedavg(epochs=1)", "fedavg(epochs=1) | private(names='3.*')"])
def test_a_run_starts_from_given_weights(method: str, tmp_path: Path) -> None:
    serial(tmp_path / "first", "fedavg(epochs=1)", rounds=1)
    (weights,) = tmp_path.glob("first/*/final.safetensors")
    serial(tmp_path / "serial", method, initial=str(weights))
    app = NodeApp(initial=weights)
    flower(tmp_path / "flower", method, Double(app, 3), initial=str(weights))
    assert apart(final(tmp_path / "serial"), final(tmp_path / "flower")) < 1e-12
    assert len(rows(tmp_path / "flower")) == 2
