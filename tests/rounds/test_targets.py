"""Targets of any metric, and metrics of a user's own, from a run to its tables."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from commandline import Feddkd
from feddkd import Experiment, InputError, Task, load, simulate
from feddkd.extend import Metric
from feddkd.method import Batch
from feddkd.reports.tables import grid
from feddkd.rounds.metrics import METRICS, check_target, find_metrics, read_target
from feddkd.rounds.metrics.metric import OWN
from feddkd.runs.record import find
from feddkd.runs.summary import best_row, to_target
from feddkd.tasks.lookup import TASKS

COSTS = {"communications": 1, "local_steps": 2.0, "bytes_up": 3, "bytes_down": 4}


def history(name: str, values: list[float]) -> list[dict[str, Any]]:
    return [{"round": t, f"test_{name}": v, **COSTS} for t, v in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("target", "name", "reached"),
    [
        ("rmse <= 0.3", "rmse", 3),
        (0.3, "rmse", 3),
        ("rmse<=1e-1", "rmse", None),
        ("r2 >= 0.3", "r2", 1),
        (0.5, "accuracy", 2),
        ("accuracy >= 0.5", "accuracy", 2),
    ],
)
def test_a_target_is_reached_in_the_direction_of_its_metric(
    target: float | str, name: str, reached: int | None
) -> None:
    values = [0.4, 0.5, 0.3] if name != "rmse" else [0.5, 0.4, 0.3]
    found = to_target(history(name, values), target)
    assert (found and found["round"]) == reached
    assert found is None or found["target"] == target


LOWER_IS_BETTER = {
    "loss", "log_loss", "calibration_error", "mse", "rmse", "mae", "perplexity", "bits_per_token",
}  # fmt: skip


@pytest.mark.parametrize("name", METRICS)
def test_errors_and_losses_are_better_when_lower(name: str) -> None:
    assert METRICS[name].higher_is_better == (name not in LOWER_IS_BETTER)


@pytest.mark.parametrize("name", METRICS)
def test_the_best_round_follows_the_direction_of_every_metric(name: str) -> None:
    rows = history(name, [0.5, 0.9, 0.1])
    assert best_row(rows)["round"] == (2 if METRICS[name].higher_is_better else 3)


@pytest.mark.parametrize(
    ("target", "named"),
    [
        ("rmse >= 0.3", "write <="),
        ("r2 <= 0.3", "write >="),
        ("rmse < 0.3", "'rmse <= 0.3'"),
        ("rmse <= nan", "'rmse <= 0.3'"),
        ("rsme <= 1", "did you mean 'rmse'?"),
        ("auc >= 0.3", "which is not measured"),
        ("", "'rmse <= 0.3'"),
    ],
)
def test_a_target_that_no_row_can_reach_is_refused(target: str, named: str) -> None:
    with pytest.raises(InputError) as caught:
        check_target(target, find_metrics(["rmse", "r2"]))
    assert named in str(caught.value)
    with pytest.raises(InputError):
        Experiment("fedavg()", task="regression", target=target)


def test_a_target_of_a_share_is_a_share() -> None:
    with pytest.raises(InputError, match="> 0 and <= 1"):
        Experiment("fedavg()", target=70)
    assert Experiment("fedavg()", target=1).target == 1.0
    assert read_target(0.7, METRICS["accuracy"]).text == "70 %"


# --- a metric of one's own


def near(output: Tensor, batch: Batch) -> dict[str, Tensor]:
    there = (batch.share > 0).double()
    return {"near": ((output[:, 0] - batch.y[:, 0]).abs() < 1) * there, "count": there}


NEAR = Metric(
    "missed",
    "missed",
    lambda output, batch: {name: each.sum() for name, each in near(output, batch).items()},
    lambda sums: 1 - sums["near"] / sums["count"],
    higher_is_better=False,
)


def missing() -> Task:
    """Learn numbers; the headline is a metric of one's own."""
    return Task(
        loss=lambda z, y, share: ((z - y).square().sum(-1) * share).sum(),
        divergence=lambda t, s, share: ((t - s).square().sum(-1) * share).sum(),
        metrics=[NEAR, "rmse"],
    )


def test_a_metric_of_ones_own_is_the_headline_of_records_and_tables(
    tmp_path: Path, feddkd: Feddkd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TASKS, "_factories", {**TASKS._factories})
    TASKS.register(missing)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(30, 4, generator=draw)
    torch.manual_seed(0)
    result = simulate(
        model=nn.Linear(4, 1),
        clients=[(x[:15], 3 * x[:15, :1]), (x[15:], 3 * x[15:, :1])],
        test=(x, 3 * x[:, :1]),
        method="fedavg(epochs=2, lr=0.05)",
        task="missing",
        target="missed <= 0.6",
        rounds=3,
        out=tmp_path / "run",
    )
    assert (
        result.summary["best_round"]
        == min(result.history, key=lambda row: (row["test_missed"], row["round"]))["round"]
    )
    OWN.clear()  # as in a process that has only the record
    (record,) = find(tmp_path)
    assert grid([record])[0][:2] == ["method", "best"]
    assert load(tmp_path)[0].summary["test_missed"] == result.summary["test_missed"]
    OWN.clear()
    done = feddkd("report", str(tmp_path))
    assert "missed" in done.out
    assert "missed <= 60 %" in done.out


def test_a_metric_of_ones_own_may_not_take_a_name_of_the_package() -> None:
    with pytest.raises(InputError, match="already"):
        find_metrics([Metric("rmse", "mine", lambda output, batch: {}, lambda sums: sums["a"])])
