"""The options of commands that run experiments, declared once."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import torch
import typer

from feddkd.cli.console import AsJson, DataDir
from feddkd.experiment import Experiment
from feddkd.runs.runner import How, in_precision
from feddkd.runs.session import Every

Threads = Annotated[
    int | None, typer.Option(min=1, help="CPU threads; 1 is quickest for small networks.")
]
EveryRounds = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Checkpoint after every N rounds, not by the clock."),
]
OnDivergence = Annotated[
    str | None,
    typer.Option(
        metavar="drop|stop|continue", help="For clients whose numbers are not finite; as --set."
    ),
]


@dataclass(frozen=True)
class RunOptions:
    """What `run`, `resume` and `paper run` take alike."""

    engine: Annotated[
        str,
        typer.Option(
            help="Where clients compute: auto, batched, pool, serial; flower-sim: on a Ray cluster."
        ),
    ] = "auto"
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu"
    precision: Annotated[
        str | None, typer.Option(help="fp64 (as dtype = float64), fp32; on a GPU also tf32, bf16.")
    ] = None
    strategy: Annotated[
        str | None, typer.Option(help="Of the batched engine: auto, vmap, graph, fused, ...")
    ] = None
    threads: Threads = None
    data: DataDir = None
    every_rounds: EveryRounds = None
    every_minutes: Annotated[
        float, typer.Option(min=0, metavar="N", help="Checkpoint once so many minutes have passed.")
    ] = 1.0
    log: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Log rounds, too: csv, tensorboard, mlflow, wandb; repeatable."
        ),
    ] = None
    as_json: AsJson = False

    @property
    def every(self) -> Every:
        """When checkpoints are written."""
        return Every(self.every_rounds, self.every_minutes)

    def how(
        self, experiments: list[Experiment], *, fresh: bool = False, until: int | None = None
    ) -> tuple[list[Experiment], How]:
        """Return the experiments in the precision asked for, and how to run them; set the number of
        threads.
        """
        experiments, options = in_precision(experiments, self.precision, self.engine, self.device)
        if self.strategy is not None:
            options["strategy"] = self.strategy
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return experiments, How(
            self.engine, self.device, options, self.data, self.every, fresh, until
        )


def with_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of RunOptions beside its own; it gets them together as `options`."""
    hints = get_type_hints(RunOptions, include_extras=True)
    own_hints = get_type_hints(command, include_extras=True)
    own = [p for p in inspect.signature(command).parameters.values() if p.name != "options"]
    shared = [
        p.replace(annotation=hints[p.name])
        for p in inspect.signature(RunOptions).parameters.values()
    ]
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        *(p.replace(annotation=own_hints[p.name]) for p in own),
        *(p.replace(kind=keyword) for p in shared),
    ]

    @functools.wraps(command)
    def whole(*positional: Any, **given: Any) -> None:
        options = RunOptions(**{p.name: given.pop(p.name) for p in shared})
        command(*positional, **given, options=options)

    del whole.__wrapped__
    whole.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    whole.__annotations__ = {p.name: p.annotation for p in parameters}
    return whole
