"""The part of an experiment that a server sends to nodes, and what a node takes from it.

A node takes what training needs and nothing else: names of methods and networks, numbers, and
the key of the draws. A path in a message never decides which file is read: it must lie in the
node's own data folder, and a network or a task in a Python file must be in the file that the node
was given.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feddkd.experiment import Experiment
from feddkd.flower.wire import WireError
from feddkd.spec.parser import read_calls
from feddkd.spec.python_file import names_file
from feddkd.tasks.lookup import task_digest_text

TRAINING = (
    "method",
    "model",
    "clients",
    "seed",
    "dtype",
    "transform",
    "shuffle",
    "metrics",
    "task",
    "attack",
)
# for nodes that take their examples from a source of feddkd
DATA = ("data", "partition", "split_seed", "validation", "training", "public")
START = "initial_sha256"  # the sha256 of the weights that a run starts from
IN_FILE = re.compile(r"python:(?P<sha256>[0-9a-f]{64}):(?P<call>.*)", re.DOTALL)
PATHS = ("path", "file")  # options that name files


def to_send(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of an experiment's keys that nodes are sent.

    A network or a task in a Python file is named by the file's sha256.
    """
    experiment = Experiment(**keys)
    sent = {name: keys[name] for name in (*TRAINING, *DATA, START) if keys.get(name) is not None}
    if names_file(experiment.data):
        sent.pop("data")
    sent["transform"] = experiment.transform_text
    if names_file(experiment.model):
        sent["model"] = experiment.architecture.canonical
    if names_file(experiment.task):
        sent["task"] = task_digest_text(experiment.task)
    return sent


@dataclass(frozen=True)
class SentExperiment:
    """An experiment as a node reads it, and the sha256 of the weights that it starts from."""

    experiment: Experiment
    initial_sha256: str | None

    @property
    def name(self) -> str:
        """The name of the experiment in tags."""
        return self.experiment.digest[:12] + (self.initial_sha256 or "")[:12]


def read_sent(
    keys: Mapping[str, Any], *, brings_data: bool, folder: Path | None, network: Path | None
) -> SentExperiment:
    """Return the experiment that a server has sent; raise WireError if the node does not take it.

    `brings_data`: the node has its own examples and ignores what the message says about data.
    """
    taken = {name: keys[name] for name in TRAINING if name in keys}
    if brings_data:
        taken["partition"] = "elsewhere()"
    else:
        taken |= {name: keys[name] for name in DATA if name in keys}
        if "data" not in taken:
            raise WireError("the server names no data for nodes; start the node with --load")
        taken |= {name: _inside(taken, name, folder) for name in ("data", "partition")}
    taken["model"] = _own_file("network", str(keys.get("model", "")), network)
    if "task" in taken:
        taken["task"] = _own_file("task", str(taken["task"]), network)
    sha256 = keys.get(START)
    return SentExperiment(Experiment(**taken), None if sha256 is None else str(sha256))


def _inside(keys: Mapping[str, Any], name: str, folder: Path | None) -> str:
    """Return a source or a partition with each path as a path in the node's data folder."""
    text = str(keys.get(name, getattr(Experiment, name)))
    if names_file(text):
        raise WireError(f"the server names a Python file as {name}; a node runs none")
    calls = []
    for call, options in read_calls(name, text):
        placed = {key: _placed(key, value, folder) for key, value in options.items()}
        arguments = ", ".join(f"{key}={value!r}" for key, value in placed.items())
        calls.append(f"{call}({arguments})")
    return " | ".join(calls)


def _placed(key: str, value: Any, folder: Path | None) -> Any:
    if not isinstance(value, str) or (key not in PATHS and not {"/", "\\"} & set(value)):
        return value
    if folder is None:
        raise WireError("the server names a file, and this node has no data folder (--data)")
    place = (folder / value).resolve()
    if not place.is_relative_to(folder.resolve()) or not place.exists():
        raise WireError("the server names a file that is not in the data folder of this node")
    return str(place)


def _own_file(what: str, text: str, file: Path | None) -> str:
    """Return the text of a network or a task; if it names a Python file, that of the node."""
    match = IN_FILE.fullmatch(text)
    if match is None:
        if names_file(text):
            raise WireError(
                f"the server names the path of a Python file as {what}; a node runs none"
            )
        return text
    if file is None:
        raise WireError(f"the {what} is in a Python file; start the node with --network FILE.py")
    if hashlib.sha256(file.read_bytes()).hexdigest() != match["sha256"]:
        raise WireError(f"the Python file of this node is not the one with the server's {what}")
    return f"{file}:{match['call']}"
