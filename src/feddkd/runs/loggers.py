"""Loggers: they send each round to a CSV file, TensorBoard, MLflow or Weights & Biases."""

import csv
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from feddkd.errors import InputError, unknown
from feddkd.experiment import Experiment
from feddkd.rounds.loop import Row
from feddkd.rounds.metrics import headline
from feddkd.runs.record import folder_name


class Logger(Protocol):
    """The interface of a logger of one run."""

    def row(self, row: Row) -> None:
        """Log a row. The first one is of a later round if the run was continued."""

    def close(self) -> None:
        """End the log."""


def numbers(row: Row) -> dict[str, float]:
    """Return the numbers of a row by name, and the gain of DKD over the plain average."""
    theory = {f"diagnostics/{name}": value for name, value in row.get("diagnostics", {}).items()}
    groups = {
        f"{key}/{name}": value
        for key in row
        if key.startswith("test_") and key.endswith("_by_group")
        for name, value in row[key].items()
    }
    found = {
        name: value
        for name, value in {**row, **theory, **groups}.items()
        if isinstance(value, int | float) and name != "round"
    }
    metric = headline([row])
    if metric.average_key in row:
        found["dkd_gain"] = row[metric.test_key] - row[metric.average_key]
    return found


class Csv:
    """Writes rounds.csv in the run's folder, one line for each round."""

    def __init__(self, experiment: Experiment, folder: Path) -> None:
        self.path = folder / "rounds.csv"
        self.lines: list[dict[str, Any]] = []

    def row(self, row: Row) -> None:
        # keep the lines from before a halt
        if not self.lines and row["round"] > 1 and self.path.exists():
            with self.path.open(newline="", encoding="utf-8") as file:
                self.lines = [
                    line for line in csv.DictReader(file) if int(line["round"]) < row["round"]
                ]
        self.lines.append({"round": row["round"], **numbers(row)})
        # a phase that starts in a later round adds columns
        columns = list(dict.fromkeys(name for line in self.lines for name in line))
        with self.path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(self.lines)

    def close(self) -> None:
        pass


class TensorBoard:
    """Writes events in the run's folder: `tensorboard --logdir runs`."""

    def __init__(self, experiment: Experiment, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.open: Callable[[int], Any] = lambda step: SummaryWriter(
            str(folder / "tensorboard"), purge_step=step
        )
        self.writer: Any = None

    def row(self, row: Row) -> None:
        # TensorBoard drops later steps of a run that was cut short
        self.writer = self.writer or self.open(row["round"])
        for name, value in numbers(row).items():
            self.writer.add_scalar(name, value, row["round"])

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


class Mlflow:
    """Logs to a run of the experiment `feddkd` at MLFLOW_TRACKING_URI."""

    def __init__(self, experiment: Experiment, folder: Path) -> None:
        from mlflow import MlflowClient

        self.client = MlflowClient()
        present = self.client.get_experiment_by_name("feddkd")
        owner = present.experiment_id if present else self.client.create_experiment("feddkd")
        self.run = self.client.create_run(owner, run_name=folder.name).info.run_id
        for key, value in experiment.canonical.items():
            self.client.log_param(self.run, key, value)

    def row(self, row: Row) -> None:
        for name, value in numbers(row).items():
            self.client.log_metric(self.run, name, value, step=row["round"])

    def close(self) -> None:
        self.client.set_terminated(self.run)


class Wandb:
    """Logs to a run of the project `feddkd`; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, experiment: Experiment, folder: Path) -> None:
        import wandb

        self.run = wandb.init(
            project="feddkd", name=folder.name, config=experiment.canonical, reinit="create_new"
        )

    def row(self, row: Row) -> None:
        self.run.log(numbers(row), step=row["round"])

    def close(self) -> None:
        self.run.finish()


LOGGERS: Mapping[str, Callable[[Experiment, Path], Logger]] = {
    "csv": Csv,
    "tensorboard": TensorBoard,
    "mlflow": Mlflow,
    "wandb": Wandb,
}


PACKAGES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}


def check_loggers(names: Sequence[str]) -> None:
    """Raise an InputError if a logger is unknown or its package is missing."""
    for name in names:
        if name not in LOGGERS:
            raise unknown(f"unknown logger {name!r}", name, LOGGERS)
        if name in PACKAGES and find_spec(PACKAGES[name]) is None:
            raise InputError(f"--log {name} needs a package: pip install 'feddkd[{name}]'")


class RunLoggers:
    """The loggers of one run.

    They open with its first row, so a run that was finished before opens none.
    """

    def __init__(self, names: Sequence[str], experiment: Experiment, place: Path) -> None:
        self._names, self._experiment, self._place = names, experiment, place
        self._open: list[Logger] = []

    def row(self, row: Row) -> None:
        if not self._open:
            folder = self._place / folder_name(self._experiment)
            self._open = [LOGGERS[name](self._experiment, folder) for name in self._names]
        for logger in self._open:
            logger.row(row)

    def close(self) -> None:
        for logger in self._open:
            logger.close()
        self._open = []
