"""The example of every task runs, for a round of one method."""

from pathlib import Path

import pytest

from feddkd.experiment import load
from feddkd.runs.prepare import prepare
from feddkd.runs.session import job
from feddkd.simulation import Simulation

ROOT = Path(__file__).parents[2]
LOCAL = "epochs=1, steps=2, batch_size=8, lr=0.05"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((path.name, []) for path in sorted((ROOT / "examples" / "tasks").glob("*.toml"))),
        ("language.toml", ["model=examples/tasks/language.py:transformer"]),
    ],
)
def test_the_example_of_a_task_runs(
    name: str, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    short = f"sweep.method=['fedavg({LOCAL}) | dkd(steps=1, batch_size=8)']"
    asked = [*settings, short, "sweep.seed=[0]", "rounds=1"]
    (experiment,) = load(Path("examples/tasks") / name, asked)
    with Simulation(job([experiment], [prepare(experiment, None)])) as simulation:
        (rows,) = simulation.rounds()
    for metric in experiment.measured:
        assert rows[0][metric.test_key] == pytest.approx(rows[0][metric.test_key], nan_ok=False)
