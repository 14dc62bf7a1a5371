"""Rounds as they come: told to other programs, and to people."""

import csv
import sys
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from feddkd import Experiment, InputError
from feddkd.cli.progress import Bars, Follower
from feddkd.data.batches import Reads, draw
from feddkd.runs.loggers import LOGGERS, Csv, RunLoggers, check_loggers, numbers
from feddkd.runs.record import folder_name

EXPERIMENT = Experiment(
    method="fedavg(epochs=2, batch_size=8) | dkd(steps=3, batch_size=4)", clients=3
)


def row(t: int, **more: Any) -> dict[str, Any]:
    return {
        "round": t,
        "clients": [0, 2],
        "test_accuracy": 0.5 + t / 10,
        "bytes_up": 10 * t,
        **more,
    }


def tell(name: str, place: Path, *rows: dict[str, Any]) -> Path:
    folder = place / folder_name(EXPERIMENT)
    folder.mkdir(exist_ok=True)
    with closing(RunLoggers([name], EXPERIMENT, place)) as loggers:
        for one in rows:
            loggers.row(one)
    return folder


def lines(folder: Path) -> list[dict[str, str]]:
    with (folder / "rounds.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_numbers_are_what_a_logger_can_take() -> None:
    found = numbers(
        row(
            1,
            average_test_accuracy=0.4,
            test_loss=None,
            diagnostics={"L1": 0.25, "client_loss": [1.0]},
        )
    )
    assert found == pytest.approx(
        {
            "test_accuracy": 0.6,
            "bytes_up": 10,
            "average_test_accuracy": 0.4,
            "dkd_gain": 0.2,
            "diagnostics/L1": 0.25,
        }
    )


def test_csv_has_a_line_a_round_also_when_a_phase_sets_in_later(tmp_path: Path) -> None:
    folder = tell("csv", tmp_path, row(1), row(2, average_test_accuracy=0.6))
    assert [line["round"] for line in lines(folder)] == ["1", "2"]
    assert [line["average_test_accuracy"] for line in lines(folder)] == ["", "0.6"]


def test_csv_goes_on_where_a_run_was_cut_short_and_begins_anew_with_a_run(tmp_path: Path) -> None:
    tell("csv", tmp_path, row(1), row(2), row(3))
    folder = tell("csv", tmp_path, row(2, bytes_up=99), row(3))
    assert [line["bytes_up"] for line in lines(folder)] == ["10", "99", "30"]
    tell("csv", tmp_path, row(1))
    assert len(lines(folder)) == 1


def test_tensorboard_reads_what_was_told_it(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tell("tensorboard", tmp_path, row(1), row(2))
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    told = events.Scalars("test_accuracy")
    assert [event.step for event in told] == [1, 2]
    assert [event.value for event in told] == pytest.approx([0.6, 0.7])


class Heard(list[tuple[Any, ...]]):
    """Stands for the parts of other packages that are called: notes what it hears."""

    def __getattr__(self, name: str) -> Any:
        def hear(*args: Any, **more: Any) -> "Heard":
            self.append((name, *args, more))
            return self

        return hear


def test_wandb_hears_config_rounds_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test against the documented calls alone; the package itself is not installed."""
    heard, module = Heard(), ModuleType("wandb")
    monkeypatch.setattr(module, "init", heard.init, raising=False)
    monkeypatch.setitem(sys.modules, "wandb", module)
    tell("wandb", tmp_path, row(1), row(2))
    assert [call[0] for call in heard] == ["init", "log", "log", "finish"]
    assert heard[0][-1]["config"] == EXPERIMENT.canonical
    assert (heard[2][1]["test_accuracy"], heard[2][-1]) == (pytest.approx(0.7), {"step": 2})


def test_a_logger_is_opened_with_the_first_row_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []

    def opening(experiment: Experiment, folder: Path) -> Csv:
        opened.append(folder)
        return Csv(experiment, folder)

    monkeypatch.setattr("feddkd.runs.loggers.LOGGERS", {"csv": opening})
    tell("csv", tmp_path)
    assert opened == []
    tell("csv", tmp_path, row(1), row(2))
    assert len(opened) == 1


def test_what_cannot_be_logged_to_is_complained_of_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(
        InputError, match="unknown logger 'paper'; there are: csv, mlflow, tensorboard, wandb"
    ):
        check_loggers(["csv", "paper"])
    monkeypatch.setattr("feddkd.runs.loggers.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'feddkd\[mlflow\]'"):
        check_loggers(["mlflow"])
    check_loggers(["csv"])
    assert set(LOGGERS) == {"csv", "tensorboard", "mlflow", "wandb"}


@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(1, 3),
    st.none() | st.integers(1, 9),
    st.booleans(),
)
def test_the_examples_that_are_said_to_be_read_are_read(
    n: int, size: int, epochs: int, steps: int | None, drop: bool
) -> None:
    reads = Reads(size, epochs, steps, drop_last=drop)
    assert reads.examples(n) == sum(map(len, draw(reads, n, ("key", 0, 0))))


def test_people_are_told_accuracy_gain_and_images_a_second(tmp_path: Path) -> None:
    follower = Follower(EXPERIMENT, 1, [10, 20, 30])
    said = follower.after(row(1, average_test_accuracy=0.55))
    assert follower.images == 2 * (10 + 30) + 3 * 2 * 4
    assert said.startswith("test 60.0 %, DKD +5.0, ")
    assert said.endswith("images/s")
    assert np.isfinite(float(said.split(", ")[2].split()[0].replace(",", "")))


def test_a_run_of_first_rounds_alone_ends_where_these_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Bars([EXPERIMENT], torch.device("cpu"), until=2) as bars:
        bars.begin(0, [10, 20, 30])
        bars.row(0, row(1))
        assert capsys.readouterr().err == ""
        bars.row(0, row(2))
    assert capsys.readouterr().err == "fedavg | dkd, seed 0: round 2, test 70.0 %\n"
    follower = Follower(EXPERIMENT, 2, [10, 20, 30])
    follower.after(row(2))
    assert follower.left(row(2)) == "0 s"
