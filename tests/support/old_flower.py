"""Play a kept Flower app in this process: its files say which server and client are run."""

import importlib
import runpy
import tomllib
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.common.config import flatten_dict

from flower_double import Double, Tamper

SMALL = {"experiment.dtype": "float64", "experiment.model": "mlp(hidden='4')"}


def untouched(part: int, asked: Message, reply: Message) -> Message:
    """Return a node's reply, unchanged."""
    return reply


def play(folder: Path, changed: dict[str, Any], tamper: Tamper = untouched) -> None:
    """Run the app of a deployment folder over two nodes, which hold node-0.npz and node-1.npz."""
    facts = tomllib.loads((folder / "app" / "pyproject.toml").read_text(encoding="utf-8"))
    flower = facts["tool"]["flwr"]["app"]
    client = _client(folder / "app", flower["components"]["clientapp"])
    configs = {part: {"file": str(folder / f"node-{part}.npz")} for part in range(2)}
    grid = Double(client, 2, tamper, configs)
    module, _, name = flower["components"]["serverapp"].partition(":")
    server = getattr(importlib.import_module(module), name)
    config = flatten_dict(flower["config"])
    config |= {"data": str(folder), "poll": 0.0, **SMALL, **changed}
    server(grid, Context(1, 0, {}, RecordDict(), config))


def _client(folder: Path, component: str) -> Any:
    """Return the object that a component names, in the files of the app."""
    module, _, name = component.partition(":")
    return runpy.run_path(str(folder / f"{module}.py"))[name]
