"""Secure aggregation for real, on loopback; `make federation` runs it."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from feddkd import Experiment
from feddkd.engines import select
from feddkd.flower.apps import engine_on
from feddkd.flower.deployment.local_federation import Deployment, deployed
from feddkd.runs.runner import execute
from flower_double import FEDDKD, SETTING, apart, final, rows
from test_deployment import Watched
from test_flower import Deaf

# Flower's own
pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
FOUR: dict[str, Any] = {**SETTING, "clients": 4, "rounds": 1, "method": FEDDKD}


def run(
    deployment: Deployment, folder: Path, experiment: Experiment, on_push: Any = lambda kind: None
) -> None:
    with deployment.link.run() as grid:
        deployment.wait(grid, 60)
        engine = engine_on(
            Watched(grid, on_push), experiment, secure=True, deadline=60.0, join=60.0
        )
        execute([experiment], out=folder, engine=engine)


@pytest.mark.federation
@pytest.mark.parametrize("nodes", [2, 4])
def test_secure_sums_on_real_nodes_are_those_of_serial(nodes: int, tmp_path: Path) -> None:
    """Two nodes stand for two clients each."""
    execute([Experiment(**FOUR)], out=tmp_path / "serial", engine="serial")
    with deployed(nodes, secure=True) as deployment:
        run(deployment, tmp_path / "secure", Experiment(**FOUR))
        assert apart(final(tmp_path / "serial"), final(tmp_path / "secure")) < 1e-9
        if nodes == 4:
            check_one_may_go(deployment, tmp_path, Experiment(**{**FOUR, "seed": 4}))


def check_one_may_go(deployment: Deployment, folder: Path, experiment: Experiment) -> None:
    """A node is ended when its upload has come; its shares may have, or not.

    Its upload counts; in DKD it is missing.
    """
    pushed: list[str] = []

    def on_push(kind: str) -> None:
        pushed.append(kind)
        if kind == "query.unmask" and pushed.count(kind) == 1:
            deployment.processes.end("node3")

    run(deployment, folder / "fault", experiment, on_push)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "ENGINES", {**select.ENGINES, "deaf": Deaf})
        patch.setattr(Deaf, "deaf", frozenset({(1, 1, 1, 3)}))
        execute([experiment], out=folder / "deaf", engine="deaf")
    assert rows(folder / "fault")[0]["missing"] == [["distil", 1, 3, "drop"]]
    assert apart(final(folder / "deaf"), final(folder / "fault")) < 1e-9
