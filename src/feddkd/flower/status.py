"""The status of a federation: run, round, and each client's node, last answer and bytes.

The server writes it to status.json in its folder after every exchange, for `feddkd flower status`
and for the metrics. Beside the file's times nothing depends on it.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from feddkd.errors import InputError
from feddkd.flower.messages import ClientInfo
from feddkd.method import Exchange
from feddkd.runs.files import put
from feddkd.version import __version__

FILE = "status.json"


@dataclass
class ClientStatus:
    """The server's knowledge about a client's node."""

    node: str  # the name of its key
    examples: int
    answers: int = 0
    failures: int = 0
    bytes_up: int = 0  # of tensors
    bytes_down: int = 0
    last_answer: float | None = None  # seconds since 1970
    last_failure: str = ""


@dataclass
class Status:
    """The state of a federation; written to a file, if there is one."""

    file: Path | None = None
    run: str = ""
    rounds: int = 0  # of the run
    clients_in_all: int = 0
    round: int = 0  # that is being played
    phase: str = ""
    step: int = 0
    version: str = __version__
    written: float = 0.0
    clients: dict[int, ClientStatus] = field(default_factory=dict)

    def begin(self, run: str, rounds: int, clients: int) -> None:
        """Note that a run begins."""
        self.run, self.rounds, self.clients_in_all = run, rounds, clients
        self.round, self.phase, self.step = 0, "", 0
        self.clients.clear()
        self.write()

    def joined(self, clients: Mapping[int, ClientInfo], names: Mapping[int, str]) -> None:
        """Note clients that have joined, and the names of their nodes."""
        for client, info in clients.items():
            self.clients[client] = ClientStatus(names[client], info.counts.get("train", 0))
        self.write()

    def begin_exchange(self, exchange: Exchange, round: int) -> None:
        """Note the exchange that begins."""
        self.round, self.phase, self.step = round, exchange.phase.name, exchange.step
        self.write()

    def sent(self, client: int, size: int) -> None:
        """Note the bytes of tensors that a client is sent."""
        if client in self.clients:
            self.clients[client].bytes_down += size

    def answered(self, client: int, size: int) -> None:
        """Note an answer that counts."""
        if one := self.clients.get(client):
            one.answers, one.bytes_up = one.answers + 1, one.bytes_up + size
            one.last_answer = time.time()

    def failed(self, client: int, why: str) -> None:
        """Note an answer that does not count, or none."""
        if one := self.clients.get(client):
            one.failures, one.last_failure = one.failures + 1, why

    def write(self) -> None:
        """Write the file."""
        if self.file is not None:
            self.written = time.time()
            put(self.file, json.dumps(self.as_dict(), indent=1).encode())

    def as_dict(self) -> dict[str, Any]:
        """Return the status as JSON values."""
        return {name: value for name, value in asdict(self).items() if name != "file"}


def read_status(folder: Path) -> dict[str, Any]:
    """Return the status that a server has written to its folder."""
    try:
        return dict(json.loads((folder / FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise InputError(
            f"there is no {FILE} in {folder}: give the --folder of feddkd flower server, after a"
            " run has begun there"
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(f"{folder / FILE} cannot be read: {error}") from None


def metrics(status: Mapping[str, Any]) -> str:
    """Return the status in the text format of Prometheus."""
    run = f'run="{_escaped(status["run"])}",version="{_escaped(status["version"])}"'
    lines = [
        f"feddkd_round{{{run}}} {status['round']}",
        f"feddkd_rounds{{{run}}} {status['rounds']}",
        f"feddkd_clients{{{run}}} {status['clients_in_all']}",
        f"feddkd_clients_joined{{{run}}} {len(status['clients'])}",
        f"feddkd_status_seconds {status['written']:.3f}",
    ]
    for client, one in status["clients"].items():
        labels = f'client="{client}",node="{_escaped(one["node"])}"'
        for name in ("examples", "answers", "failures", "bytes_up", "bytes_down"):
            lines.append(f"feddkd_client_{name}{{{labels}}} {one[name]}")
        if one["last_answer"] is not None:
            lines.append(f"feddkd_client_last_answer_seconds{{{labels}}} {one['last_answer']:.3f}")
    return "".join(f"{line}\n" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
