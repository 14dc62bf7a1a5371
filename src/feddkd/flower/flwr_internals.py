"""The names of flwr that its documentation does not promise, in one file.

All other modules of this package import only flwr.app, flwr.clientapp, flwr.serverapp and
flwr.simulation. When flwr moves or changes one of its private names, only this file has to
change. The gateway also runs this file alone, so it must not import feddkd.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from flwr.cli.build import build_fab_from_files
from flwr.cli.cli_client_interceptor import CliClientHttpInterceptor
from flwr.common.secure_aggregation.crypto.symmetric_encryption import (
    decrypt,
    encrypt,
    generate_shared_key,
)
from flwr.common.secure_aggregation.secaggplus_utils import (
    share_keys_plaintext_concat,
    share_keys_plaintext_separate,
)
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, StartRunRequest
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.protobuf.client import ProtobufClient, ProtobufClientInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink import extensions
from flwr.superlink.cli import flower_superlink
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.supernode import start_client_internal
from flwr.supernode.cli.flower_supernode import flower_supernode
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

__all__ = [
    "AcquireTaskRequest",
    "CliClientHttpInterceptor",
    "ControlHttpClient",
    "Fab",
    "HeartbeatSender",
    "HttpGrid",
    "ListNodesRequest",
    "ProtobufClient",
    "ProtobufClientInterceptor",
    "PullTaskInputRequest",
    "PushTaskOutputRequest",
    "RegisterNodeRequest",
    "RuntimeHttpClient",
    "RuntimeTokenHttpInterceptor",
    "RuntimeVersionHttpInterceptor",
    "SendTaskHeartbeatRequest",
    "StartRunRequest",
    "SuperExecAuthHttpInterceptor",
    "TaskIdentity",
    "TaskType",
    "build_fab_from_files",
    "decrypt",
    "encrypt",
    "fab_to_proto",
    "flower_supernode",
    "generate_shared_key",
    "limit_retries",
    "pull_task_input",
    "push_message",
    "push_task_output",
    "replace_node_sleep",
    "retry_content_sooner",
    "run_from_proto",
    "run_superlink",
    "runtime_client",
    "share_keys_plaintext_concat",
    "share_keys_plaintext_separate",
    "stop_retrying",
]

FIRST_RETRY = 0.05  # seconds
LOCKED = 120_000  # milliseconds
PATIENCE = 20  # heartbeats of a task, one every 30 s


def retry_content_sooner() -> None:
    """Ask for a message's content again after 0.05 s, then after ever longer times.

    The content often comes a moment after the message, and flwr waits a second before it asks
    again.
    """
    options = {**(pull_objects.__kwdefaults__ or {}), "initial_backoff": FIRST_RETRY}
    pull_objects.__kwdefaults__ = options


def limit_retries(grid: object, seconds: float) -> None:
    """Let a Grid over HTTP fail when the SuperLink has not answered for `seconds`.

    flwr itself would retry for ever. Other Grids (of a simulation, of a test) do not change.
    """
    if isinstance(grid, HttpGrid):
        grid._retry_invoker.max_time = seconds


def stop_retrying(grid: HttpGrid) -> None:
    """Let every further request of a Grid be tried once only."""
    grid._retry_invoker.max_tries = 1


def runtime_client(grid: HttpGrid) -> RuntimeHttpClient:
    """Return the client that a Grid talks through; the first call makes it."""
    return grid._runtime_client


def replace_node_sleep(sleep: Callable[[float], None]) -> None:
    """Call this function wherever the SuperNode's main loop would sleep."""
    start_client_internal.time = SimpleNamespace(sleep=sleep)  # type: ignore[assignment, attr-defined]


def run_superlink(middleware: Sequence[Any]) -> None:
    """Run flwr's SuperLink, as its command does, behind this ASGI middleware.

    A request waits while another writes a large model to the database (flwr gives up after 5 s),
    and the server's task may be silent for ten minutes meanwhile (in flwr, for one).
    """
    with suppress(ImportError):  # another version of flwr may keep them elsewhere
        from flwr.supercore import sql_mixin
        from flwr.supercore.corestate import sql_corestate

        sql_corestate.HEARTBEAT_PATIENCE = PATIENCE  # type: ignore[attr-defined]
        pragmas = {**dict(getattr(sql_mixin, "SQLITE_PRAGMAS", ())), "busy_timeout": str(LOCKED)}
        sql_mixin.SQLITE_PRAGMAS = tuple(pragmas.items())  # type: ignore[attr-defined, assignment]
    extensions.get_middleware = lambda: tuple(middleware)
    flower_superlink()
