"""Flower's two apps: the ServerApp runs an experiment as `feddkd run` does, the ClientApp answers for a node's clients.

An app's pyproject.toml names them: feddkd.flower.apps:server and feddkd.flower.apps:client."""

import os
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from feddkd.engines.flower.letters import Shelf, bound, bytes_in, page_of, page_record, tensor_record
from feddkd.errors import RunError
from feddkd.execute import execute
from feddkd.experiment import expand
from feddkd.flower.desk import Load, Own, ask, respond
from feddkd.session import Every

EXPERIMENT = "experiment."  # keys of the run's configuration that begin so are the experiment's
PATIENCE = 60.0  # seconds for a SuperLink that does not answer
OPTIONS = {"deadline": float, "join": float, "poll": float}  # of the engine


class NodeApp(ClientApp):
    """Answers query.<what>, train.<phase>, evaluate. Which phases there are is the method's business, so none is registered."""

    def __init__(self, load: Load | None = None) -> None:
        super().__init__()
        self._load = load

    def __call__(self, message: Message, context: Context) -> Message:
        own, shelf, page = self._own(context), Shelf(context), page_of(message)
        category, _, what = message.metadata.message_type.partition(".")
        if category == "query":
            told, kept = ask(own, what, page, shelf.read())
            shelf.write(kept)
            return Message(RecordDict({"page": page_record(told)}), reply_to=message)
        answered, content, kept = respond(own, page, bytes_in(message.content), shelf.read())
        shelf.write(kept)
        return Message(RecordDict({"page": page_record(answered), "tensors": tensor_record(content)}), reply_to=message)

    def _own(self, context: Context) -> Own:
        config = context.node_config
        folder = config.get("data", os.environ.get("FEDDKD_DATA"))
        part, parts = (int(config[key]) for key in ("partition-id", "num-partitions"))
        return Own(part, parts, Path(str(folder)) if folder else None, self._load, bool(config.get("secure", False)), context)


client = NodeApp()
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    bound(grid, PATIENCE)
    for summary in serve(grid, context.run_config):
        if "ended" in summary:
            raise RunError(summary["ended"])


def serve(grid: Grid, config: Any) -> list[dict[str, Any]]:
    """One experiment over the nodes behind a Grid: record, checkpoints and costs are those of any run."""
    spelled = {key.removeprefix(EXPERIMENT): value for key, value in config.items() if key.startswith(EXPERIMENT)}
    experiments = expand(spelled)
    options = {name: kind(config[name]) for name, kind in OPTIONS.items() if name in config}
    secure = bool(config.get("secure", False))
    if secure and "threshold" in config:
        options["threshold"] = float(config["threshold"])
    folder = config.get("data") or os.environ.get("FEDDKD_DATA")
    return execute(
        experiments, out=Path(config.get("out", "runs")), folder=Path(folder) if folder else None,
        engine="flower-secure" if secure else "flower",
        options={"grid": grid, "experiment": experiments[0].as_dict(), **options}, every=Every(rounds=1),
    )  # fmt: skip
