"""feddkd flower:

its commands and what they say when something is wrong; certificates, keys, the app for one's own
data.
"""

import os
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)

from feddkd.cli.app import main
from feddkd.cli.flower_node import _function
from feddkd.flower.apps import NodeApp, serve
from feddkd.flower.deployment.template import FILES
from flower_double import Double, rows


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    """Commands for real machines write private files; the next test is another command."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def feddkd(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["feddkd", "flower", *words])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


WRONG = {
    "up tiny.toml --nodes 3": "3 nodes are more than the 2 clients",
    "up none.toml": "none.toml",
    "up tiny.toml --nodes 0": "--nodes",
    "up tiny.toml --nodes two": "--nodes",
    "up odd.toml": "fedodd",
    "up tiny.toml --data nowhere --set data=emnist": "nowhere",
    "client host:1 --part 0 --parts 2 --key k --authority k --port {taken}": (
        "cannot listen on 127.0.0.1:{taken}: "
    ),
    "server tiny.toml --folder made --keys keys --host 127.0.0.1 --port {taken}": (
        "cannot listen on 127.0.0.1:{taken}: "
    ),
    "up tiny.toml --secure": "at least 3 clients",
    "server tiny.toml --folder full --keys keys --secure --threshold 0.5": (
        "more than a half and at most 1, not 0.5"
    ),
    "client host:1 --part 2 --parts 2 --key k --authority k": "parts are counted from 0 to 1",
    "client host:1 --part 0 --parts 2 --key nokey --authority k": "there is no file nokey",
    "client host:1 --part 0 --parts 2 --key k --authority k --load none.py:load": (
        "there is no file 'none.py'"
    ),
    "client host:1 --part 0 --parts 2 --key k --authority k --load k.py:read": (
        "k.py has no function 'read'"
    ),
    "client host:1 --part 0 --parts 2 --key k --authority k --device tpu": "tpu",
    "client host:1 --part 0 --parts 2 --key k --authority k --network none.py": (
        "there is no file none.py"
    ),
    "client host:1 --part 0 --parts 2 --key k --authority k --least 5": "go with --secure",
    "client host:1 --part 0 --parts 2 --key k --authority k --secure --peers none": (
        "there is no folder none"
    ),
    "key k": "k already holds a key",
    "init full": "full is not empty",
    "server tiny.toml --folder full --keys full": "no public keys (*.pub) in full",
    "server tiny.toml --folder full --keys keys": "there is no ca.crt in full",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_mistake_is_one_line(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text("method = 'fedavg()'\nclients = 2\n")
    Path("odd.toml").write_text("method = 'fedodd()'\n")
    for folder in ("full", "keys", "made"):
        Path(folder).mkdir()
    for file in (
        "k",
        "k.py",
        "full/file",
        "keys/a.pub",
        "made/ca.crt",
        "made/server.pem",
        "made/server.key",
    ):
        Path(file).write_text("")
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        assert feddkd(monkeypatch, *line.format(taken=taken).split()) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert WRONG[line].format(taken=taken) in told


def test_the_engine_needs_a_federation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text("method = 'fedavg()'\n")
    monkeypatch.setattr(sys, "argv", ["feddkd", "run", "tiny.toml", "--engine", "flower"])
    with pytest.raises(SystemExit):
        main()
    assert "engine 'flower' runs inside a federation" in capsys.readouterr().err


def test_a_servers_certificate_holds_its_names_and_only_its_owner_reads_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert feddkd(monkeypatch, "certificate", str(tmp_path), "fed.example.org", "192.0.2.7") == 0
    root, leaf = (
        x509.load_pem_x509_certificate((tmp_path / name).read_bytes())
        for name in ("ca.crt", "server.pem")
    )
    leaf.verify_directly_issued_by(root)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fed.example.org", "localhost"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == [
        "192.0.2.7",
        "127.0.0.1",
    ]
    assert stat.S_IMODE((tmp_path / "server.key").stat().st_mode) == 0o600
    key = load_pem_private_key((tmp_path / "server.key").read_bytes(), None)
    assert key.public_key() == leaf.public_key()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "ca.crt",
        "ca.key",
        "server.key",
        "server.pem",
    ]


def test_a_nodes_key_is_of_the_kind_flower_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert feddkd(monkeypatch, "key", str(tmp_path / "node")) == 0
    key = load_ssh_private_key((tmp_path / "node").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.curve.name == "secp384r1"
    assert key.public_key() == load_ssh_public_key((tmp_path / "node.pub").read_bytes())
    assert stat.S_IMODE((tmp_path / "node").stat().st_mode) == 0o600


def test_the_app_for_ones_own_data_runs_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert feddkd(monkeypatch, "init", str(tmp_path / "app")) == 0
    assert {path.name: path.read_text() for path in (tmp_path / "app").iterdir()} == FILES
    draw = np.random.default_rng(0)
    for part in range(2):
        x = draw.normal(size=(20, 5)).astype(np.float32)
        np.savez(tmp_path / f"{part}.npz", x=x, y=draw.integers(0, 3, 20))
    np.savez(
        tmp_path / "test.npz",
        x_test=draw.normal(size=(10, 5)).astype(np.float32),
        y_test=np.arange(10) % 3,
    )
    load = _function(f"{tmp_path / 'app' / 'client_app.py'}:load")
    grid = Double(
        NodeApp(load),
        2,
        configs={part: {"file": str(tmp_path / f"{part}.npz")} for part in range(2)},
    )
    config = _flat(tmp_path / "app" / "pyproject.toml")
    serve(grid, {**config, "data": str(tmp_path), "out": str(tmp_path / "runs"), "poll": 0.0})
    assert len(rows(tmp_path / "runs")) == 3


def _flat(path: Path) -> dict[str, object]:
    """A run's configuration as Flower makes it of an app's."""
    import tomllib

    from flwr.common.config import flatten_dict

    return dict(flatten_dict(tomllib.loads(path.read_text())["tool"]["flwr"]["app"]["config"]))
