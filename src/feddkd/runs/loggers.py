"""Rounds as they come, told to other programs as well:

one small interface, each kind where its package is installed.
"""

import csv
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from feddkd.errors import InputError, choices
from feddkd.experiment import Experiment
from feddkd.rounds.loop import Row
from feddkd.runs.record import folder_name


class Logger(Protocol):
    """Of one run, which may have been halted: the first row it is told of need not be that of round
    1.
    """

    def row(self, row: Row) -> None: ...

    def close(self) -> None: ...


def numbers(row: Row) -> dict[str, float]:
    """What of a row is a number, by name; and what DKD added to the plain average."""
    within = {f"diagnostics/{name}": value for name, value in row.get("diagnostics", {}).items()}
    found = {
        name: value
        for name, value in {**row, **within}.items()
        if isinstance(value, int | float) and name != "round"
    }
    if "average_test_accuracy" in row:
        found["dkd_gain"] = row["test_accuracy"] - row["average_test_accuracy"]
    return found


class Csv:
    """rounds.csv in the run's folder, a line a round."""

    def __init__(self, experiment: Experiment, folder: Path) -> None:
        self.path = folder / "rounds.csv"
        self.lines: list[dict[str, Any]] = []

    def row(self, row: Row) -> None:
        # what stood before the halt stays
        if not self.lines and row["round"] > 1 and self.path.exists():
            with self.path.open(newline="", encoding="utf-8") as file:
                self.lines = [
                    line for line in csv.DictReader(file) if int(line["round"]) < row["round"]
                ]
        self.lines.append({"round": row["round"], **numbers(row)})
        # a phase may set in later
        columns = list(dict.fromkeys(name for line in self.lines for name in line))
        with self.path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(self.lines)

    def close(self) -> None:
        pass


class TensorBoard:
    """Events in the run's folder: `tensorboard --logdir runs`."""

    def __init__(self, experiment: Experiment, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.open: Callable[[int], Any] = lambda step: SummaryWriter(
            str(folder / "tensorboard"), purge_step=step
        )
        self.writer: Any = None

    def row(self, row: Row) -> None:
        # later steps of a run that was cut short are purged
        self.writer = self.writer or self.open(row["round"])
        for name, value in numbers(row).items():
            self.writer.add_scalar(name, value, row["round"])

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


class Mlflow:
    """A run of the experiment `feddkd`, wherever MLFLOW_TRACKING_URI says."""

    def __init__(self, experiment: Experiment, folder: Path) -> None:
        from mlflow import MlflowClient

        self.client = MlflowClient()
        known = self.client.get_experiment_by_name("feddkd")
        owner = known.experiment_id if known else self.client.create_experiment("feddkd")
        self.run = self.client.create_run(owner, run_name=folder.name).info.run_id
        for key, value in experiment.canonical.items():
            self.client.log_param(self.run, key, value)

    def row(self, row: Row) -> None:
        for name, value in numbers(row).items():
            self.client.log_metric(self.run, name, value, step=row["round"])

    def close(self) -> None:
        self.client.set_terminated(self.run)


class Wandb:
    """A run of the project `feddkd`; WANDB_MODE=offline keeps it on this machine."""

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
    """Complain before anything is run."""
    for name in names:
        if name not in LOGGERS:
            raise InputError(f"unknown logger {name!r}; there are: {choices(LOGGERS)}")
        if name in PACKAGES and find_spec(PACKAGES[name]) is None:
            raise InputError(
                f"--log {name} needs a package that is not here: pip install 'feddkd[{name}]'"
            )


class RunLoggers:
    """The loggers of one run.

    They open with its first row, so not for a run that was finished before.
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
