"""`feddkd flower up` gives its nodes the Python file that an experiment names."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from commandline import Feddkd
from feddkd import Experiment, InputError
from feddkd.cli.flower import _file_for_nodes
from feddkd.flower.deployment.local_federation import Deployment

NETWORK = "from torch import nn\n\ndef build():\n    return nn.Linear(64, 10)\n"


def test_nodes_are_started_with_the_file_of_network_and_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("net.py", "other.py"):
        Path(name).write_text(NETWORK)
    named = Experiment("fedavg()", model="net.py:build", task="net.py:build")
    assert _file_for_nodes([Experiment("fedavg()")]) is None
    assert _file_for_nodes([Experiment("fedavg()"), named]) == tmp_path / "net.py"
    with pytest.raises(InputError, match="one Python file"):
        _file_for_nodes([named, Experiment("fedavg()", model="other.py:build")])

    started: list[Any] = []

    class Listed:
        def start(self, name: str, words: list[Any], more: Any) -> None:
            started.append(words)

    for part, network in enumerate((tmp_path / "net.py", None)):
        given: Any = (tmp_path, None, Listed(), 2, None, False, 1, network)
        Deployment(*given).start_node(part)
    assert started[0][started[0].index("--network") + 1] == tmp_path / "net.py"
    assert "--network" not in started[1]


def test_data_in_a_python_file_are_refused_before_a_node_starts(
    feddkd: Feddkd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("def data():\n    pass\n")
    Path("own.toml").write_text('method = "fedavg()"\ndata = "own.py:data"\nclients = 2\n')
    ended = feddkd("flower", "up", "own.toml")
    assert ended.status == 2
    assert "own.py" in ended.err
