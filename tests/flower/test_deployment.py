"""Flower for real, on loopback: TLS, nodes that show who they are, processes that come and go.

The first test is CI's; the others take minutes and are `make federation`'s.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Message

from feddkd import Experiment, NobodyAnsweredError
from feddkd.flower.apps import engine_on
from feddkd.flower.deployment.credentials import AUTHORITY, make_node, make_server
from feddkd.flower.deployment.local_federation import Deployment, deployed
from feddkd.flower.deployment.processes import Processes, free_port
from feddkd.flower.deployment.template import FILES
from feddkd.rounds.loop import Row
from feddkd.runs.runner import execute
from feddkd.runs.session import Every
from flower_double import DKD, FEDDKD, LOCAL, NORM, SETTING, apart, check_same, final, rows
from playing import execute as execute_watched
from test_processes import alive, gone

# Flower's own
pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
TWO: dict[str, Any] = {**SETTING, "clients": 2, "method": FEDDKD}


class Watched:
    """A Grid that tells of every push, when the messages are on their way."""

    def __init__(self, grid: Any, told: Callable[[str], None]) -> None:
        self._grid, self._told = grid, told

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        kinds = [message.metadata.message_type for message in messages]
        numbers = self._grid.push_messages(messages)
        self._told(kinds[0])
        return numbers  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)


def run(
    deployment: Deployment,
    folder: Path,
    *,
    on_round: Callable[[Row], None] = lambda row: None,
    on_push: Callable[[str], None] = lambda kind: None,
    deadline: float = 60.0,
    **changes: Any,
) -> None:
    experiment = Experiment(**{**TWO, **changes})
    with deployment.link.run() as grid:
        deployment.wait(grid, 60)
        engine = engine_on(
            Watched(grid, on_push), experiment, secure=False, deadline=deadline, join=60.0
        )
        execute_watched(
            [experiment],
            out=folder,
            engine=engine,
            every=Every(rounds=1),
            on_row=lambda index, row: on_round(row),
        )


def uploaded(folder: Path) -> list[int]:
    """Bytes that came up in each round."""
    totals = [0, *(row["bytes_up"] for row in rows(folder))]
    return [after - before for before, after in pairwise(totals)]


@pytest.mark.long
def test_a_deployment_gives_what_serial_gives_outlives_a_node_and_leaves_nothing_running(
    tmp_path: Path,
) -> None:
    execute([Experiment(**{**TWO, "rounds": 1})], out=tmp_path / "serial", engine="serial")
    with deployed(2) as deployment:
        pids = [process.pid for process in deployment.processes.running.values()]
        run(deployment, tmp_path / "flower", rounds=1)
        check_same(tmp_path / "serial", tmp_path / "flower")
        run(
            deployment,
            tmp_path / "fault",
            on_round=lambda row: deployment.processes.end("node1") if row["round"] == 1 else None,
        )
    assert len(pids) == 3
    assert gone(pids)
    both, one = uploaded(tmp_path / "fault")
    assert one == both / 2
    assert apart(final(tmp_path / "serial"), final(tmp_path / "fault")) > 0


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with deployed(2) as made:
        yield made


def restart(deployment: Deployment) -> None:
    """Restart a node as systemd would.

    For about a minute after a SIGKILL the SuperLink refuses it, as if it were still connected.
    """
    log, limit = deployment.processes.log("node1"), time.monotonic() + 150
    joined = log.read_text().count("SuperNode ID")
    while log.read_text().count("SuperNode ID") == joined and time.monotonic() < limit:
        if (
            "node1" not in deployment.processes.running
            or deployment.processes.running["node1"].poll() is not None
        ):
            deployment.start_node(1)
        time.sleep(0.5)


@pytest.mark.federation
@pytest.mark.parametrize(
    ("kind", "time_", "left"),
    [("train.local", 1, 3), ("train.distil", 1, 4), ("train.distil", 2, 5)],
    ids=["in training", "before DKD's first answer", "in the middle of the J steps"],
)
def test_a_node_killed_in_any_phase_is_missed_in_that_round_and_back_when_restarted(
    deployment: Deployment, kind: str, time_: int, left: int, tmp_path: Path
) -> None:
    """Uploads of six messages a round, from two clients in three exchanges; `left` of them arrive
    in the round of the fault.
    """
    pushed: list[str] = []

    def on_push(sent: str) -> None:
        pushed.append(sent)
        if pushed.count(kind) == time_ and sent == kind:
            deployment.processes.end("node1", by=signal.SIGKILL)

    run(
        deployment,
        tmp_path,
        on_push=on_push,
        on_round=lambda row: restart(deployment) if row["round"] == 1 else None,
        deadline=20.0,
    )
    fault, whole = uploaded(tmp_path)
    assert 6 * fault == pytest.approx(left * whole, rel=0.01)


@pytest.mark.federation
def test_a_superlink_that_is_gone_ends_the_run_and_the_server_resumes_with_another(
    tmp_path: Path,
) -> None:
    execute([Experiment(**{**TWO, "rounds": 3})], out=tmp_path / "serial", engine="serial")
    with deployed(2) as first:
        stop = {1: lambda: first.processes.end("superlink", by=signal.SIGKILL)}
        begun = time.monotonic()
        with pytest.raises(NobodyAnsweredError, match="the SuperLink has not answered for"):
            run(
                first,
                tmp_path / "flower",
                rounds=3,
                on_round=lambda row: stop.get(row["round"], lambda: None)(),
                deadline=20.0,
            )
        assert time.monotonic() - begun < 120
    with deployed(2) as second:
        run(second, tmp_path / "flower", rounds=3)
    check_same(tmp_path / "serial", tmp_path / "flower")


@pytest.mark.federation
def test_a_server_that_is_killed_and_started_again_goes_on_with_the_nodes_that_waited(
    tmp_path: Path,
) -> None:
    """Nodes are restarted as systemd would, by the commands for real machines.

    SCAFFOLD's clients keep their memos.
    """
    changes = {**TWO, "method": f"scaffold({LOCAL}) | {DKD}", "rounds": 3}
    execute([Experiment(**changes)], out=tmp_path / "serial", engine="serial")
    (tmp_path / "tiny.toml").write_text(
        "\n".join(f"{key} = {value!r}" for key, value in changes.items())
    )
    make_server(tmp_path / "fed", ["localhost"])
    feddkd, port = [sys.executable, "-m", "feddkd", "flower"], free_port()
    places = [
        "--folder",
        tmp_path / "fed",
        "--keys",
        tmp_path,
        "--out",
        tmp_path / "runs",
        "--host",
        "127.0.0.1",
    ]
    server = [
        *feddkd,
        "server",
        tmp_path / "tiny.toml",
        *places,
        "--port",
        port,
        "--deadline",
        60,
        "--join",
        120,
    ]

    def played(rounds: int) -> bool:
        return any(
            len(path.read_text().splitlines()) >= rounds
            for path in tmp_path.glob("runs/*/rounds.jsonl")
        )

    with Processes(tmp_path) as processes:
        for part in range(2):
            make_node(tmp_path / f"node{part}")
        processes.start("server", server)
        # both keys are known
        until(lambda: words(tmp_path / "fed" / "superlink.log").count("Created node_id") == 2)
        for part in range(2):
            own = [
                "--key",
                tmp_path / f"node{part}",
                "--authority",
                tmp_path / "fed" / AUTHORITY,
                "--port",
                free_port(),
            ]
            processes.start(
                f"node{part}",
                [*feddkd, "client", f"127.0.0.1:{port}", "--part", part, "--parts", 2, *own],
            )
        until(lambda: played(1))
        links = children(processes.running["server"].pid)
        processes.end("server", by=signal.SIGKILL)
        assert gone(links, 20.0)
        assert not played(3)
        processes.start("server", server)
        until(lambda: bool(list(tmp_path.glob("runs/*/summary.json"))))
        processes.running.pop("server").wait(60)
        processes.check()  # the nodes have been there all the time
    check_same(tmp_path / "serial", tmp_path / "runs")


def until(done: Callable[[], bool], seconds: float = 180.0) -> None:
    limit = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < limit
        time.sleep(0.1)


def words(log: Path) -> str:
    return log.read_text() if log.exists() else ""


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Cut(Exception):  # noqa: N818  # nothing went wrong
    pass


@pytest.mark.federation
def test_a_server_that_resumes_finds_what_its_nodes_keep(tmp_path: Path) -> None:
    """FedBN's own layers outlive a run of Flower's, since the node does."""
    method = f"fedbn({LOCAL}) | {DKD}"
    execute(
        [Experiment(**{**TWO, **NORM, "method": method})], out=tmp_path / "serial", engine="serial"
    )
    pushed: list[str] = []

    def on_push(sent: str) -> None:
        pushed.append(sent)
        if pushed.count("train.local") == 2:
            raise Cut

    with deployed(2) as deployment:
        with pytest.raises(Cut):
            run(deployment, tmp_path / "flower", on_push=on_push, method=method, **NORM)
        run(deployment, tmp_path / "flower", method=method, **NORM)
    check_same(tmp_path / "serial", tmp_path / "flower")


@pytest.mark.federation
def test_strangers_are_refused(deployment: Deployment, tmp_path: Path) -> None:
    """Try a key that is not registered, a certificate of another authority, and no TLS."""
    make_node(tmp_path / "stranger")
    make_server(tmp_path / "other", ["localhost"])
    address, known = f"127.0.0.1:{deployment.link.port}", deployment.folder / "node1"
    client = [
        sys.executable,
        "-m",
        "feddkd",
        "flower",
        "client",
        address,
        "--part",
        "1",
        "--parts",
        "2",
    ]
    stranger = [
        *client,
        "--key",
        tmp_path / "stranger",
        "--authority",
        deployment.folder / AUTHORITY,
        "--port",
        str(free_port()),
    ]
    fooled = [
        *client,
        "--key",
        known,
        "--authority",
        tmp_path / "other" / AUTHORITY,
        "--port",
        str(free_port()),
    ]
    plain = [
        Path(sys.executable).with_name("flower-supernode"),
        "--superlink",
        address,
        "--insecure",
        "--max-retries",
        "2",
        "--host",
        "127.0.0.1",
        "--port",
        str(free_port()),
        "--node-config",
        "partition-id=1 num-partitions=2",
    ]
    with Processes(tmp_path) as processes, deployment.link.run() as grid:
        deployment.wait(grid, 60)
        before = {*grid.get_node_ids()}
        processes.start("stranger", stranger)
        processes.start("fooled", fooled)
        processes.start("plain", plain)
        assert processes.running["stranger"].wait(60) != 0
        time.sleep(10)
        assert {*grid.get_node_ids()} == before
        assert "CERTIFICATE_VERIFY_FAILED" in processes.log("fooled").read_text() or not alive(
            processes.running["fooled"].pid
        )


@pytest.mark.federation
@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name
)
def test_up_leaves_no_process_behind(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(f"method = '{FEDDKD}'\nclients = 2\nrounds = 500\n")
    command = [
        sys.executable,
        "-m",
        "feddkd",
        "flower",
        "up",
        tmp_path / "tiny.toml",
        "--nodes",
        2,
        "--out",
        tmp_path / "runs",
    ]
    with Processes(tmp_path) as processes:
        processes.start("up", command)
        up = processes.running["up"]
        until(lambda: bool(list(tmp_path.glob("runs/*/rounds.jsonl"))))
        started = children(up.pid)
        assert len(started) == 3
        up.send_signal(number)
        assert up.wait(120) == (-9 if number == signal.SIGKILL else 128 + number)
        assert number == signal.SIGKILL or "stopped after round" in processes.log("up").read_text()
        assert gone(started, 20.0)


@pytest.mark.federation
def test_the_app_for_ones_own_data_runs_on_plain_flower(tmp_path: Path) -> None:
    """`flwr run` on Flower's own SuperLink and SuperNodes: every message a process, and it works
    all the same.
    """
    tools, app, port = Path(sys.executable).parent, tmp_path / "app", free_port()
    app.mkdir()
    for name, text in FILES.items():
        (app / name).write_text(
            text.replace("rounds = 3", "rounds = 1").replace("steps=5", "steps=1")
        )
    draw = np.random.default_rng(0)
    for part in range(2):
        np.savez(
            tmp_path / f"{part}.npz",
            x=draw.normal(size=(20, 5)).astype(np.float32),
            y=draw.integers(0, 3, 20),
        )
    np.savez(
        tmp_path / "test.npz",
        x_test=draw.normal(size=(10, 5)).astype(np.float32),
        y_test=np.arange(10) % 3,
    )
    (tmp_path / "config.toml").write_text(
        f'[superlink.lab]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    quiet = {
        "FLWR_HOME": str(tmp_path),
        "PATH": f"{tools}:/usr/bin:/bin",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }
    with Processes(tmp_path) as processes:
        processes.start(
            "superlink", [tools / "flower-superlink", "--insecure", "--port", str(port)], quiet
        )
        for part in range(2):
            config = f'partition-id={part} num-partitions=2 file="{tmp_path / f"{part}.npz"}"'
            command = [
                tools / "flower-supernode",
                "--insecure",
                "--superlink",
                f"127.0.0.1:{port}",
                "--port",
                str(free_port()),
            ]
            processes.start(f"node{part}", [*command, "--node-config", config], quiet)
        time.sleep(5)
        settings = f'data="{tmp_path}" out="{tmp_path / "runs"}"'
        processes.start(
            "run", [tools / "flwr", "run", app, "lab", "--stream", "-c", settings], quiet
        )
        limit = time.monotonic() + 280
        while not list(tmp_path.glob("runs/*/summary.json")) and time.monotonic() < limit:
            time.sleep(0.5)
        assert len(rows(tmp_path / "runs")) == 1, processes.log_end("run")


@pytest.mark.federation
def test_on_ray_it_is_the_same_run(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    (tmp_path / "tiny.toml").write_text(
        "\n".join(f"{key} = {value!r}" for key, value in TWO.items())
    )
    for engine in ("serial", "flower-sim"):
        command = [
            sys.executable,
            "-m",
            "feddkd",
            "run",
            "tiny.toml",
            "--engine",
            engine,
            "--out",
            engine,
        ]
        subprocess.run(
            command,
            cwd=tmp_path,
            check=True,
            timeout=280,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    check_same(tmp_path / "serial", tmp_path / "flower-sim")
