"""What a federation on loopback costs: seconds an exchange, a round, to come up and to go; bytes on the wire beside our count.

Beside it plain Flower FedAvg on plain SuperNodes of the same machine, in the same run. Writes docs/flower-table.md.

    python experiments/flower.py [--nodes 2,4,8] [--out docs/flower-table.md]
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from flwr.app import Message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from feddkd import Experiment
from feddkd.execute import execute
from feddkd.flower.deployment import deployed
from feddkd.flower.processes import Processes, free_port

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
}  # fmt: skip
METHOD = "fedavg(epochs=1, batch_size=32, lr=0.1) | dkd(steps=10, batch_size=32, lr=0.2)"


class Weighed:
    """A Grid that weighs what passes and times what it takes, exchange by exchange."""

    def __init__(self, grid: Any) -> None:
        self._grid = grid
        self.down = self.up = 0
        self.seconds: list[float] = []
        self._waiting: set[str] = set()
        self._begun = 0.0

    def push_messages(self, messages: Sequence[Message]) -> Iterable[str]:
        self._begun = time.perf_counter()
        numbers = list(self._grid.push_messages(messages))
        self.down += sum(map(_weight, messages))
        self._waiting = set(numbers)
        return numbers

    def pull_messages(self, numbers: Iterable[str]) -> Iterable[Message]:
        found = list(self._grid.pull_messages(numbers))
        self.up += sum(map(_weight, found))
        self._waiting -= {message.metadata.reply_to_message_id for message in found}
        if found and not self._waiting:
            self.seconds.append(time.perf_counter() - self._begun)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)


def _weight(message: Message) -> int:
    return sum(len(item.deflate()) for item in get_all_nested_objects(message).values())


def measure(nodes: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Rounds of FedDKD with J = 10 on so many nodes, each one client with some digits."""
    experiment = Experiment(method=METHOD, clients=nodes, rounds=rounds, partition="iid()", model="mlp(hidden='256')")
    start = time.perf_counter()
    with deployed(nodes) as deployment, deployment.link.run() as grid:
        deployment.wait(grid, 300)
        up = time.perf_counter() - start
        weighed = Weighed(grid)
        options = {"grid": weighed, "experiment": experiment.as_dict(), "join": 300.0}
        execute([experiment], out=folder, engine="flower", options=options)
        leaving = time.perf_counter()
    down = time.perf_counter() - leaving
    (run,) = [path.parent for path in folder.rglob("summary.json")]
    last = json.loads((run / "rounds.jsonl").read_text().splitlines()[-1])
    seconds = [json.loads(line)["seconds"] for line in (run / "timings.jsonl").read_text().splitlines()]
    trained = weighed.seconds[1:]  # the first is the query who is there
    return {
        "nodes": nodes, "median": statistics.median(trained), "p95": _quantile(trained, 0.95), "exchanges": len(trained),
        "round": statistics.median(seconds[1:]), "up": up, "down": down,
        "bytes_up": weighed.up / last["bytes_up"] - 1, "bytes_down": weighed.down / last["bytes_down"] - 1,
    }  # fmt: skip


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


APP = {
    "pyproject.toml": """\
[project]
name = "plain-fedavg"
version = "1.0.0"
description = "Plain Flower"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "plain"
[tool.flwr.app.components]
serverapp = "plain:server"
clientapp = "plain:client"
[tool.flwr.app.config]
out = ""
""",
    "plain.py": """\
import json, time
import torch
from torch import nn
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

client, server = ClientApp(), ServerApp()

@client.train()
def train(message, context):
    from sklearn.datasets import load_digits
    found, part = load_digits(), int(context.node_config["partition-id"])
    x, y = torch.tensor(found.images[part::8]).float(), torch.tensor(found.target[part::8])
    net = network()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    for at in range(0, len(x), 32):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x[at:at + 32] / 16), y[at:at + 32]).backward()
        optimiser.step()
    records = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": len(x)})}
    return Message(RecordDict(records), reply_to=message)

class Timed(FedAvg):
    times = []
    def aggregate_train(self, round, replies):
        found = super().aggregate_train(round, replies)
        self.times.append(time.perf_counter())
        return found

@server.main()
def main(grid, context):
    strategy = Timed(fraction_evaluate=0.0, min_available_nodes=2, min_train_nodes=2)
    strategy.times.append(time.perf_counter())
    strategy.start(grid=grid, initial_arrays=ArrayRecord(network().state_dict()), num_rounds=6)
    with open(context.run_config["out"], "w") as file:
        json.dump(strategy.times, file)
""",
}


def plain(folder: Path) -> list[float]:
    """Seconds of each round of Flower's own FedAvg, one exchange a round, on two of Flower's own SuperNodes."""
    tools, port, out = Path(sys.executable).parent, free_port(), folder / "times.json"
    (folder / "app").mkdir()
    for name, text in APP.items():
        (folder / "app" / name).write_text(text)
    (folder / "config.toml").write_text(f'[superlink.lab]\naddress = "127.0.0.1:{port}"\ninsecure = true\n')
    quiet = {**QUIET, "FLWR_HOME": str(folder), "OMP_NUM_THREADS": "1", "PATH": f"{tools}:{os.environ['PATH']}"}
    with Processes(folder) as processes:
        processes.start("superlink", [tools / "flower-superlink", "--insecure", "--port", str(port)], quiet)
        for part in range(2):
            command = [tools / "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}", "--port", str(free_port())]
            processes.start(f"node{part}", [*command, "--node-config", f"partition-id={part} num-partitions=2"], quiet)
        time.sleep(8)
        processes.start("run", [tools / "flwr", "run", folder / "app", "lab", "--stream", "-c", f'out="{out}"'], quiet)
        limit = time.monotonic() + 300
        while not out.exists() and time.monotonic() < limit:
            time.sleep(0.5)
        time.sleep(0.5)
        times = json.loads(out.read_text())
    return [after - before for before, after in pairwise(times)]


COLUMNS = (
    "nodes", "exchange, median s", "95 % s", "exchanges", "round with J = 10, s", "up, s", "down, s", "bytes up", "bytes down",
)  # fmt: skip
NOTE = """
Plain Flower FedAvg, two plain SuperNodes, no TLS, one exchange a round: median {median:.1f} s a round, slowest {slowest:.1f} s
({count} rounds).

{cores} cores, load average {load:.1f} at the end; whoever else is at work on the machine makes everything slower. `up`: until all
nodes have joined; `down`: until no process is left. Bytes: what passes the Grid, with framing, against the costs in the record.
"""


def page(found: Sequence[dict[str, Any]], rounds: Sequence[float]) -> str:
    form = "{nodes} {median:.2f} {p95:.2f} {exchanges} {round:.1f} {up:.1f} {down:.1f} {bytes_up:+.1%} {bytes_down:+.1%}"
    rows = [COLUMNS, ["---"] * len(COLUMNS), *(form.format(**one).split() for one in found)]
    note = NOTE.format(
        median=statistics.median(rounds), slowest=max(rounds), count=len(rounds), cores=os.cpu_count(), load=os.getloadavg()[1]
    )
    return "<!-- written by experiments/flower.py -->\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows) + note


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", default="2,4,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("docs/flower-table.md"))
    given = parser.parse_args()
    os.environ |= QUIET
    found = []
    for nodes in map(int, given.nodes.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            found.append(measure(nodes, given.rounds, Path(folder)))
    with tempfile.TemporaryDirectory() as folder:
        rounds = plain(Path(folder))
    given.out.write_text(page(found, rounds), encoding="utf-8")


if __name__ == "__main__":
    main()
