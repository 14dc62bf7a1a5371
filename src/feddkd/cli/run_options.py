"""Options of the commands that run experiments."""

import functools
import inspect
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import typer

from feddkd.cli.console import AsJson, DataDir
from feddkd.engines.threads import set_threads
from feddkd.errors import InputError
from feddkd.experiment import Experiment
from feddkd.runs.runner import How, in_precision
from feddkd.runs.session import Every

Threads = Annotated[
    int | None,
    typer.Option(min=1, max=1024, help="CPU threads; 1 is fastest for small networks."),
]
EveryRounds = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Write a checkpoint after every N rounds, not by time."),
]
OnDivergence = Annotated[
    str | None,
    typer.Option(
        metavar="drop|stop|continue",
        help="Treatment of clients whose numbers are not finite; as with --set.",
    ),
]


@dataclass(frozen=True)
class RunOptions:
    """The options that `run`, `resume` and `paper run` share."""

    engine: Annotated[
        str,
        typer.Option(help="Engine: auto, batched, pool, serial; flower-sim uses a Ray cluster."),
    ] = "auto"
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu"
    precision: Annotated[
        str | None,
        typer.Option(help="fp64 (as with dtype = float64), fp32, bf16; on a GPU also tf32."),
    ] = None
    strategy: Annotated[
        str | None,
        typer.Option(help="Strategy of the batched engine: auto, vmap, graph, fused, ..."),
    ] = None
    threads: Threads = None
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Keep what was learned about speed.")
    ] = True
    data: DataDir = None
    every_rounds: EveryRounds = None
    every_minutes: Annotated[
        float, typer.Option(min=0, metavar="N", help="Write a checkpoint every N minutes.")
    ] = 1.0
    log: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Also log rounds to csv, tensorboard, mlflow or wandb; repeatable."
        ),
    ] = None
    yes: Annotated[
        bool, typer.Option("--yes", help="Run also what takes more than a day by the forecast.")
    ] = False
    as_json: AsJson = False

    @property
    def every(self) -> Every:
        """The times at which checkpoints are written."""
        if math.isnan(self.every_minutes):
            raise InputError("--every-minutes must be a number of minutes, not nan")
        return Every(self.every_rounds, self.every_minutes)

    def how(
        self, experiments: list[Experiment], *, fresh: bool = False, until: int | None = None
    ) -> tuple[list[Experiment], How]:
        """Return the experiments in the chosen precision, and how to run them; set the number of
        threads.
        """
        experiments, options = in_precision(experiments, self.precision, self.engine, self.device)
        if self.strategy is not None:
            options["strategy"] = self.strategy
        if not self.cache:
            os.environ["FEDDKD_CACHE"] = "off"
        if self.threads is not None:
            set_threads(self.threads)
        return experiments, How(
            self.engine, self.device, options, self.data, self.every, fresh, until
        )


def with_options(shared: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the options of a dataclass to a command.

    The command gets them as one value, `options`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in _parameters(command) if p.name != "options"]
        added = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in _parameters(shared)]

        @functools.wraps(command)
        def whole(*positional: Any, **given: Any) -> None:
            options = shared(**{p.name: given.pop(p.name) for p in added})
            command(*positional, **given, options=options)

        del whole.__wrapped__
        whole.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        whole.__annotations__ = {p.name: p.annotation for p in (*own, *added)}
        return whole

    return decorate


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function or a dataclass, with resolved annotations."""
    hints = get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    return [p.replace(annotation=hints[p.name]) for p in parameters]
