"""Flower for real, on loopback: TLS, nodes that show who they are, processes that come and go."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from feddkd import Experiment
from feddkd.execute import execute
from feddkd.flower.deployment import Deployment, deployed
from feddkd.rounds import Row
from flower_double import FEDDKD, SETTING, apart, check_same, final, rows
from test_processes import gone

TWO: dict[str, Any] = {**SETTING, "clients": 2, "method": FEDDKD}


def run(deployment: Deployment, folder: Path, on_round: Any = lambda row: None, **changes: Any) -> None:
    experiment = Experiment(**{**TWO, **changes})

    def on_row(index: int, row: Row) -> None:
        on_round(row)

    with deployment.link.run() as grid:
        deployment.wait(grid, 60)
        options = {"grid": grid, "experiment": experiment.as_dict(), "deadline": 60.0, "join": 60.0}
        execute([experiment], out=folder, engine="flower", options=options, on_row=on_row)


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Flower's own
def test_a_deployment_gives_what_serial_gives_outlives_a_node_and_leaves_nothing_running(tmp_path: Path) -> None:
    execute([Experiment(**{**TWO, "rounds": 1})], out=tmp_path / "serial", engine="serial")
    with deployed(2) as deployment:
        pids = [process.pid for process in deployment.processes.running.values()]
        run(deployment, tmp_path / "flower", rounds=1)
        check_same(tmp_path / "serial", tmp_path / "flower")
        run(deployment, tmp_path / "fault", lambda row: deployment.processes.end("node1") if row["round"] == 1 else None)
    assert len(pids) == 3
    assert gone(pids)
    assert apart(final(tmp_path / "serial"), final(tmp_path / "fault")) > 0
    first, second = rows(tmp_path / "fault")
    sent = first["bytes_up"]
    assert second["bytes_up"] - sent < 0.6 * sent  # half of the clients answered
