"""Every task on Flower's nodes: the numbers of plain PyTorch, in float64 to 1e-12."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from test_tasks import SEEDS, expected, keys

from feddkd.flower.apps import NodeApp, serve
from feddkd.flower.sent_experiment import read_sent, to_send
from feddkd.flower.wire import WireError
from flower_double import Double, apart, final, rows
from small_tasks import SMALL, registered


@pytest.fixture(autouse=True, scope="module")
def names() -> Iterator[None]:
    with registered():
        yield


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "scaffold", "feddkd"])
@pytest.mark.parametrize("kind", [kind for kind in SMALL if kind not in ("mse", "mae")])
def test_nodes_compute_what_plain_pytorch_does(kind: str, method: str, tmp_path: Path) -> None:
    written = {f"experiment.{key}": value for key, value in keys(kind, method).items()}
    options = {"out": str(tmp_path), "poll": 0.0, "deadline": 5.0, "join": 5.0}
    serve(Double(NodeApp(), 4), {**written, **options})
    wanted, loss = expected(kind, method, SEEDS[0])
    assert apart(final(tmp_path), wanted) < 1e-12
    assert rows(tmp_path)[-1]["test_loss"] == pytest.approx(loss, rel=1e-12)


TASK_FILE = """
from pathlib import Path
from feddkd import Task
Path("was_run").touch()
def task():
    return Task(
        loss=lambda z, y, share: ((z - y).abs().sum(-1) * share).sum(),
        divergence=lambda t, s, share: ((t - s).square().sum(-1) * share).sum(),
    )
"""


def test_a_node_takes_a_task_only_from_the_file_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine.py", "theirs.py"):
        Path(name).write_text(TASK_FILE + f"# {name}")
    sent = to_send({**keys("mse", "fedavg"), "task": "mine.py:task"})
    assert "mine.py" not in sent["task"]
    with pytest.raises(WireError, match="--network"):
        read_sent(sent, brings_data=False, folder=None, network=None)
    with pytest.raises(WireError, match="is not the one with the server's task"):
        read_sent(sent, brings_data=False, folder=None, network=Path("theirs.py"))
    named = {**sent, "task": "mine.py:task"}
    with pytest.raises(WireError, match="a node runs none"):
        read_sent(named, brings_data=False, folder=None, network=Path("mine.py"))
    assert not Path("was_run").exists()
    found = read_sent(sent, brings_data=False, folder=None, network=Path("mine.py"))
    assert found.experiment.parsed_task.title == "task 'mine.py:task()'"
