"""Flower's two apps: the ServerApp runs an experiment as `feddkd run` does, the ClientApp answers
for a node's clients.

An app's pyproject.toml names them: feddkd.flower.apps:server and feddkd.flower.apps:client.
"""

import logging
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from feddkd.engines.interface import EngineFactory
from feddkd.errors import RunError
from feddkd.experiment import Experiment, expand
from feddkd.flower.delivery import SECONDS, ResultNotice, deliver, keep
from feddkd.flower.engine import Flower
from feddkd.flower.flwr_internals import limit_retries, retry_content_sooner
from feddkd.flower.messages import ExchangeRequest
from feddkd.flower.node import ask, respond
from feddkd.flower.node_data import Load, NodeConfig
from feddkd.flower.opened_sums import save_sums, with_sums
from feddkd.flower.secure import Secure
from feddkd.flower.transport import (
    bytes_in,
    json_in,
    message_record,
    read_memory,
    tensor_record,
    write_memory,
)
from feddkd.flower.wire import WireError
from feddkd.runs.runner import execute
from feddkd.runs.session import Every

log = logging.getLogger(__name__)
EXPERIMENT = "experiment."  # the prefix of the experiment's keys in the run's configuration
OPTIONS = {"deadline": float, "join": float, "poll": float}  # of the engine
PATIENCE = 60.0  # seconds to wait for a SuperLink that does not answer


class NodeApp(ClientApp):
    """Answers for a node's clients, on the experiment's data or on the data that `load` returns.

    It reads the kind of a message itself: the method decides which phases there are, so no function
    can be registered for each of them.
    """

    def __init__(self, load: Load | None = None, **own: Any) -> None:
        super().__init__()
        self._load, self._own = load, own  # fields of NodeConfig that the operator has chosen

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message. The server is told why that failed only if the text is about messages:
        other errors may quote the node's files, and stay in the node's log.
        """
        try:
            return self._answer(message, context)
        except WireError:
            raise
        except Exception as error:
            log.warning("cannot answer %s", message.metadata.message_type, exc_info=True)
            raise WireError(
                f"the node cannot do this ({type(error).__name__}); its own log says why"
            ) from None

    def _answer(self, message: Message, context: Context) -> Message:
        config, content = self._config(context), json_in(message)
        before = read_memory(context)
        memory = with_sums(config.state, before)
        category, _, query = message.metadata.message_type.partition(".")
        if (category, query) == ("query", "result"):
            receipt = keep(config, ResultNotice.read(content), bytes_in(message.content))
            records = RecordDict({"page": message_record(receipt)})
        elif category == "query":
            answer, memory = ask(config, query, content, memory)
            records = RecordDict({"page": message_record(answer)})
        else:
            request = ExchangeRequest.read(content)
            reply, upload, memory = respond(config, request, bytes_in(message.content), memory)
            records = RecordDict({"page": message_record(reply), "tensors": tensor_record(upload)})
        save_sums(config.state, before, memory)
        write_memory(context, memory)
        return Message(records, reply_to=message)

    def _config(self, context: Context) -> NodeConfig:
        """Return what the node's own configuration says."""
        config = context.node_config
        folder = config.get("data", os.environ.get("FEDDKD_DATA"))
        return NodeConfig(
            int(config["partition-id"]),
            int(config["num-partitions"]),
            Path(str(folder)) if folder else None,
            self._load,
            bool(config.get("secure", False)),
            context=context,
            **self._own,
        )


def serve(grid: Any, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Run one experiment on the nodes behind a Grid, with records and checkpoints like any run."""
    keys = {
        key.removeprefix(EXPERIMENT): value
        for key, value in config.items()
        if key.startswith(EXPERIMENT)
    }
    experiments = expand(keys)
    options: dict[str, Any] = {
        name: kind(config[name]) for name, kind in OPTIONS.items() if name in config
    }
    secure = bool(config.get("secure", False))
    if secure and "threshold" in config:
        options["threshold"] = float(config["threshold"])
    folder, out = config.get("data") or os.environ.get("FEDDKD_DATA"), config.get("out", "runs")
    summaries = execute(
        experiments,
        out=Path(out),
        engine=engine_on(grid, experiments[0], secure=secure, **options),
        data=Path(folder) if folder else None,
        every=Every(rounds=1),
    )
    if not any("ended" in summary for summary in summaries):
        deliver(grid, experiments[0], Path(out), options.get("deadline", SECONDS))
    return summaries


def engine_on(
    grid: Any, experiment: Experiment, *, secure: bool = False, **options: Any
) -> EngineFactory:
    """Return a factory of the engine that runs an experiment on the nodes behind a Grid."""
    engine = Secure if secure else Flower
    return partial(engine, grid=grid, experiment=experiment.as_dict(), **options)


client = NodeApp()
server = ServerApp()


@server.main()
def _main(grid: Grid, context: Context) -> None:
    retry_content_sooner()
    limit_retries(grid, PATIENCE)
    for summary in serve(grid, context.run_config):
        if "ended" in summary:
            raise RunError(summary["ended"])
