"""FedAvg as Flower's documentation shows it:

its own strategy, an ArrayRecord of weights, digits for data.
"""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

client = ClientApp()
server = ServerApp()  # on a separate line, because Flower looks for the name in the text


def network(hidden: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


@client.train()
def train(message: Message, context: Context) -> Message:
    from sklearn.datasets import load_digits

    found, part, parts = (
        load_digits(),
        *(int(context.node_config[key]) for key in ("partition-id", "num-partitions")),
    )
    x, y = (
        torch.tensor(found.images[part::parts]).float() / 16,
        torch.tensor(found.target[part::parts]),
    )
    net = network(int(context.run_config["hidden"]))
    net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    for at in range(0, len(x), 32):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x[at : at + 32]), y[at : at + 32]).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    arrays, metrics = ArrayRecord(net.state_dict()), MetricRecord({"num-examples": len(x)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


class Timed(FedAvg):
    """Notes when each round's answers were there."""

    def __init__(self, nodes: int) -> None:
        super().__init__(fraction_evaluate=0.0, min_available_nodes=nodes, min_train_nodes=nodes)
        self.times: list[float] = []

    def configure_train(self, *told: Any) -> Iterable[Message]:
        messages = super().configure_train(*told)  # waits until all nodes are there
        self.times = self.times or [time.perf_counter()]
        return messages

    def aggregate_train(self, *told: Any) -> tuple[ArrayRecord | None, MetricRecord | None]:
        found = super().aggregate_train(*told)
        self.times.append(time.perf_counter())
        return found


@server.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    strategy, arrays = (
        Timed(int(config["nodes"])),
        ArrayRecord(network(int(config["hidden"])).state_dict()),
    )
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=int(config["rounds"]))
    out = Path(str(config["out"]))
    out.with_suffix(".part").write_text(json.dumps(strategy.times))
    out.with_suffix(".part").rename(out)
