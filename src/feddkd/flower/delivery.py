"""The model of a finished run: the server sends it to all nodes, and a node with a folder for
results keeps it.

The folder of a result holds what `feddkd predict` needs: final.safetensors, manifest.json and
partition.json, as in the folder of a run.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import RecordDict
from safetensors import SafetensorError
from safetensors.torch import load

from feddkd.experiment import Experiment
from feddkd.flower.membership import AnyMember
from feddkd.flower.messages import WireMessage
from feddkd.flower.node_data import NodeConfig
from feddkd.flower.sent_experiment import to_send
from feddkd.flower.transport import Outgoing, Transport, json_in, message_record, tensor_record
from feddkd.flower.wire import MOST, WireError
from feddkd.runs.files import put
from feddkd.runs.record import folder_name
from feddkd.runs.seal import SealWriter

log = logging.getLogger(__name__)
KEPT = 100  # models in a node's folder for results; a server cannot fill the disk
SECONDS = 60.0  # for all nodes to take a model


@dataclass(frozen=True)
class ResultNotice(WireMessage):
    """Says what the model is that comes with the message: the final model of a run."""

    experiment: Mapping[str, Any]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class ResultReceipt(WireMessage):
    """Says whether a node has kept the model."""

    kept: bool


def deliver(grid: Any, experiment: Experiment, out: Path, seconds: float = SECONDS) -> int:
    """Send the final model of a run to all nodes; return how many have kept it."""
    folder = out / folder_name(experiment)
    classes = json.loads((folder / "partition.json").read_text(encoding="utf-8"))["classes"]
    notice = ResultNotice(to_send(experiment.as_dict()), tuple(classes))
    tensors = tensor_record((folder / "final.safetensors").read_bytes())
    content = RecordDict({"page": message_record(notice), "tensors": tensors})
    transport, kept = Transport(grid, AnyMember(), 0.1), 0
    nodes = sorted(transport.online_nodes())
    outgoing = [Outgoing(node, -1, 0, "query.result", content) for node in nodes]
    for asked, reply in transport.send(outgoing, seconds):
        try:
            kept += ResultReceipt.read(json_in(reply)).kept
        except WireError as error:
            log.warning("node %s has not taken the model: %s", asked.node, error)
    log.info("the model is in %s; %s of %s nodes have kept it", folder, kept, len(nodes))
    return kept


def keep(config: NodeConfig, notice: ResultNotice, content: bytes) -> ResultReceipt:
    """Write a model below the folder for results, if the node has one."""
    if config.results is None:
        return ResultReceipt(kept=False)
    if len(content) > MOST:
        raise WireError(f"the model has {len(content):,} bytes; at most {MOST:,} are allowed")
    try:
        load(content)
    except SafetensorError as error:
        raise WireError(f"the model is no safetensors file: {error}") from None
    sent = config.read(notice.experiment)
    folder = config.results / sent.name
    if not folder.exists() and len(list(config.results.glob("*"))) >= KEPT:
        raise WireError(f"the folder for results is full: it holds {KEPT} models")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    keys, model = sent.experiment.as_dict(), sent.experiment.canonical["model"]
    manifest = {"experiment": keys, "canonical": {"model": model}}
    files = {
        "manifest.json": json.dumps({**manifest, "sealed": True}, indent=2).encode(),
        "partition.json": json.dumps({"classes": list(notice.classes)}).encode(),
        "final.safetensors": content,
    }
    seal = SealWriter(folder)
    seal.begin([], files)
    seal.close()
    for name, text in files.items():
        put(folder / name, text)
    log.info("the model of a finished run is in %s", folder)
    return ResultReceipt(kept=True)
