"""Flower's two apps: the ServerApp runs an experiment as `feddkd run` does, the ClientApp answers
for a node's clients.

An app's pyproject.toml names them: feddkd.flower.apps:server and feddkd.flower.apps:client.
"""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from feddkd.engines.interface import EngineFactory
from feddkd.errors import RunError
from feddkd.experiment import Experiment, expand
from feddkd.flower.app_bases import Answering, Kept, serving
from feddkd.flower.engine import Flower
from feddkd.flower.messages import Page
from feddkd.flower.node import Load, Own, ask, respond
from feddkd.flower.secure import Secure
from feddkd.runs.runner import execute
from feddkd.runs.session import Every

EXPERIMENT = "experiment."  # keys of the run's configuration that begin so are the experiment's
OPTIONS = {"deadline": float, "join": float, "poll": float}  # of the engine


class NodeApp(Answering):
    """A node's clients, on the experiment's data or on what `load` brings."""

    def __init__(self, load: Load | None = None) -> None:
        super().__init__()
        self._load = load

    def ask(self, context: Any, what: str, page: Page, kept: Kept) -> tuple[Page, Kept]:
        return ask(self._own(context), what, page, kept)

    def respond(
        self, context: Any, page: Page, sent: bytes, kept: Kept
    ) -> tuple[Page, bytes, Kept]:
        return respond(self._own(context), page, sent, kept)

    def _own(self, context: Any) -> Own:
        config = context.node_config
        folder = config.get("data", os.environ.get("FEDDKD_DATA"))
        part, parts = (int(config[key]) for key in ("partition-id", "num-partitions"))
        return Own(
            part,
            parts,
            Path(str(folder)) if folder else None,
            self._load,
            bool(config.get("secure", False)),
            context,
        )


def serve(grid: Any, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One experiment over the nodes behind a Grid: record, checkpoints and costs are those of any
    run.
    """
    spelled = {
        key.removeprefix(EXPERIMENT): value
        for key, value in config.items()
        if key.startswith(EXPERIMENT)
    }
    experiments = expand(spelled)
    options: dict[str, Any] = {
        name: kind(config[name]) for name, kind in OPTIONS.items() if name in config
    }
    secure = bool(config.get("secure", False))
    if secure and "threshold" in config:
        options["threshold"] = float(config["threshold"])
    folder = config.get("data") or os.environ.get("FEDDKD_DATA")
    return execute(
        experiments,
        out=Path(config.get("out", "runs")),
        engine=engine_on(grid, experiments[0], secure=secure, **options),
        data=Path(folder) if folder else None,
        every=Every(rounds=1),
    )


def engine_on(grid: Any, experiment: Experiment, *, secure: bool, **options: Any) -> EngineFactory:
    """Return what makes the engine of an experiment over the nodes behind a Grid."""
    return partial(
        Secure if secure else Flower, grid=grid, experiment=experiment.as_dict(), **options
    )


def _serve_to_the_end(grid: Any, config: Mapping[str, Any]) -> None:
    for summary in serve(grid, config):
        if "ended" in summary:
            raise RunError(summary["ended"])


client = NodeApp()
server = serving(_serve_to_the_end)
