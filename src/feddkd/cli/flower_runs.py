"""Run experiments on Flower nodes. Flower is optional: it is imported when a command needs it."""

import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from logging import Formatter, Handler, StreamHandler
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from feddkd.cli.console import AsJson, DataDir
from feddkd.cli.run_options import EveryRounds, RunOptions
from feddkd.cli.show_runs import show
from feddkd.errors import InputError
from feddkd.experiment import Experiment
from feddkd.runs.prepare import prepare
from feddkd.runs.runner import How, play
from feddkd.runs.session import Event, Every, RunEnded

if TYPE_CHECKING:
    from feddkd.flower.deployment.superlink import Superlink


@dataclass(frozen=True)
class FederationOptions:
    """The options that `up` and `server` share."""

    data: DataDir = None
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where run folders are written.")] = Path(
        "runs"
    )
    deadline: Annotated[
        float,
        typer.Option(min=1, metavar="SECONDS", help="Later answers are ignored."),
    ] = 600.0
    secure: Annotated[
        bool,
        typer.Option(
            "--secure", help="Secure aggregation: uploads are masked, the server learns only sums."
        ),
    ] = False
    threshold: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            show_default="2/3",
            help="With --secure: the share of a cohort that must answer to open a sum; over 1/2.",
        ),
    ] = 2 / 3
    every_rounds: EveryRounds = 1
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Run again what is finished or was cut short.")
    ] = False
    log: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Also log rounds to csv, tensorboard, mlflow or wandb; repeatable."
        ),
    ] = None
    as_json: AsJson = False

    @property
    def how(self) -> How:
        """Return how experiments are run: their data, checkpoints and whether they restart."""
        return How(data=self.data, every=Every(self.every_rounds), fresh=self.fresh)

    def engine(self, join: float) -> dict[str, Any]:
        """Return the options of the engine."""
        secure = {"secure": True, "threshold": self.threshold} if self.secure else {}
        return {"deadline": self.deadline, "join": join, **secure}

    def check(self, experiments: list[Experiment]) -> None:
        """Raise an InputError if experiments cannot run on nodes, before anything is started."""
        if self.secure:
            with using_flower():
                from feddkd.flower.summable import check_summable

                for experiment in experiments:
                    check_summable(experiment.as_dict(), self.threshold)
        for experiment in experiments:
            prepare(experiment, self.data)


def run_on_nodes(
    link: "Superlink",
    experiments: list[Experiment],
    options: FederationOptions,
    join: float,
    wait: Callable[[Any, float], None] = lambda grid, seconds: None,
    own: Mapping[str, Any] | None = None,
    lines: Handler | None = None,
) -> None:
    """Run one experiment after another, each as a Flower run, and show them.

    The nodes get the model of each. `own` are more options of the engine, `lines` takes what the
    package logs.
    """
    from feddkd.flower.delivery import deliver

    def events() -> Generator[Event]:
        for at, experiment in enumerate(experiments):
            with link.run() as grid:
                wait(grid, join)
                engine = {**options.engine(join), **(own or {})}
                for event in _play(experiment, grid, options.out, engine, options.how):
                    yield event._replace(at=at)
                    if isinstance(event, RunEnded) and "ended" not in event.summary:
                        deliver(grid, experiment, options.out)

    places = [options.out] * len(experiments)
    log = options.log or ()
    show(events(), experiments, places, as_json=options.as_json, log=log, lines=lines)


def _play(
    experiment: Experiment, grid: Any, out: Path, options: dict[str, Any], how: How
) -> Generator[Event]:
    """Run an experiment on the nodes behind a Grid."""
    from feddkd.flower.apps import engine_on

    engine = engine_on(grid, experiment, **options)
    return play([experiment], out, replace(how, engine=engine))


def ray_events(
    experiments: list[Experiment], places: list[Path], options: RunOptions, fresh: bool
) -> Generator[Event]:
    """Run one experiment after another in Flower's simulation, a core for each active client."""
    with using_flower():
        from feddkd.flower.apps import NodeApp
        from feddkd.flower.deployment.ray import on_ray

        folder = None if options.data is None else options.data.resolve()
        if folder is not None:
            os.environ["FEDDKD_DATA"] = str(folder)  # Ray's workers inherit it
        how = How(data=folder, every=options.every, fresh=fresh)
        for at, experiment in enumerate(experiments):
            work = partial(_play, experiment, out=places[at], options={}, how=how)
            for event in on_ray(work, NodeApp(), experiment.clients, 1.0, 0.0):
                yield event._replace(at=at)


def write_private_files() -> None:
    """Let only the user read the files that this process and its children write from now on.

    Among them are logs, and the SuperLink's database, which holds uploads for a while.
    """
    os.umask(0o077)


def stamped(file: Path | None) -> Handler:
    """Return a handler whose lines begin with the time, in UTC: on standard error, or in a
    file. A file of 10 MB is followed by a new one; nine older ones are kept.
    """
    if file is None:
        lines: Handler = StreamHandler()
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = RotatingFileHandler(file, maxBytes=10_000_000, backupCount=9, encoding="utf-8")
    form = Formatter("%(asctime)sZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    form.converter = time.gmtime
    lines.setFormatter(form)
    return lines


@contextmanager
def using_flower() -> Iterator[None]:
    """A context for the use of Flower, which then talks to the SuperLink alone."""
    os.environ |= {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "flwr":
            raise
        raise InputError("this needs Flower: pip install 'feddkd[flower]'") from None
