"""A SuperNode and its clients in one process that stays.

Flower starts a process for every message, which costs seconds of imports for milliseconds of work.
Here the SuperNode is Flower's own, but wherever it would sleep it looks for a task, and a thread
does the task at once, with the network and the data still in memory. No code that a server sends is
run: the app is this package's and the data loader is the operator's.
"""

import logging
import secrets
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import httpx
from flwr.app import Error, Message, RecordDict
from flwr.clientapp import ClientApp

from feddkd.flower.deployment.join_checks import wait_to_join
from feddkd.flower.deployment.processes import check_free
from feddkd.flower.flwr_internals import (
    AcquireTaskRequest,
    HeartbeatSender,
    ProtobufClientInterceptor,
    RuntimeHttpClient,
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SendTaskHeartbeatRequest,
    SuperExecAuthHttpInterceptor,
    TaskType,
    flower_supernode,
    pull_task_input,
    push_message,
    push_task_output,
    replace_node_sleep,
    retry_content_sooner,
)

log = logging.getLogger(__name__)

SHORTEST, LONGEST = 0.05, 3.0  # seconds between two polls for a message
# seconds that Flower's SuperNode would sleep after it has pulled a message; otherwise it is 3
SLEEP_WITH_MESSAGE = 0.5


class TaskWorker:
    """Does a SuperNode's tasks in this process; flwr's SuperExec would start a process for each."""

    def __init__(self, address: str, secret: bytes, app: ClientApp) -> None:
        self._address, self._app = address, app
        sign = SuperExecAuthHttpInterceptor(
            master_secret=secret, protected_methods=frozenset({"/flwr.proto.Runtime/AcquireTask"})
        )
        self._tasks = self._client(sign)
        self._last_task = time.monotonic()
        # Flower starts every run with an empty state, and a server that resumes starts a new run.
        self._state = RecordDict()
        self._lock = threading.Lock()  # a node's clients share the state

    def sleep(self, seconds: float) -> None:
        """Look for a task, then sleep, in place of the SuperNode's own sleep.

        The sleep is short after recent work. If the SuperNode has pulled no message, the task is
        left over from a run that ended while its message arrived; it must not be answered, because
        the SuperNode sends one reply for each message that it pulls, and this reply would take the
        place of the next.
        """
        acquired = self._tasks.AcquireTask(
            AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
        )
        if acquired.token:
            self._last_task = time.monotonic()
            wanted = seconds <= SLEEP_WITH_MESSAGE
            # in a thread, because a task of a run that has ended waits for ever
            threading.Thread(target=self._work, args=(acquired.token, wanted), daemon=True).start()
        pause = max(SHORTEST, (time.monotonic() - self._last_task) / 100)
        time.sleep(min(seconds, pause, LONGEST))

    def _work(self, token: str, wanted: bool) -> None:
        with closing(self._client(RuntimeTokenHttpInterceptor(token))) as client:
            heartbeats = HeartbeatSender(lambda: send_heartbeat(client))
            heartbeats.start()
            try:
                self._answer(client, wanted)
            except Exception as error:  # Flower gives up the task when its time is over
                log.warning("a task has failed: %s", error)
            finally:
                heartbeats.stop()

    def _answer(self, client: RuntimeHttpClient, wanted: bool) -> None:
        message, context, _, _ = pull_task_input(client)
        if not wanted:
            return push_task_output(client, context, "failed", "its run has ended")
        status, why = "completed", ""
        try:
            with self._lock:
                context.state = RecordDict({**self._state})
                reply = self._app(message, context)
                self._state = context.state
        except Exception as error:
            log.warning("%s", error)
            status, why = "failed", f"{type(error).__name__}: {error}"
            reply = Message(Error(code=2, reason=why), reply_to=message)
        push_message(client, reply, context)
        push_task_output(client, context, status, why)

    def _client(self, *interceptors: ProtobufClientInterceptor) -> RuntimeHttpClient:
        version = RuntimeVersionHttpInterceptor(component_name="flwr-clientapp")
        chain = [version, *interceptors]
        return RuntimeHttpClient.from_server_address(self._address, True, None, chain)


def send_heartbeat(client: RuntimeHttpClient) -> bool:
    """Tell the SuperLink that a long task is still being done; return False if that failed."""
    try:
        client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
    except httpx.HTTPError:
        return False
    return True


class NodeSettings(NamedTuple):
    """The options with which a SuperNode is started."""

    superlink: str
    port: int  # its own, on this machine
    key: Path
    authority: Path
    part: int
    parts: int
    data: Path | None
    secure: bool


def run_node(app: ClientApp, node: NodeSettings) -> None:
    """Run a SuperNode until it is ended.

    Its own port serves only this process: other processes do not have the secret.
    """
    check_free("127.0.0.1", node.port)
    wait_to_join(node.superlink, node.key, node.authority)
    retry_content_sooner()
    with TemporaryDirectory(prefix="feddkd-") as folder:
        secret, file = secrets.token_bytes(32), Path(folder) / "secret"
        file.touch(mode=0o600)
        file.write_bytes(secret)
        worker = TaskWorker(f"127.0.0.1:{node.port}", secret, app)
        replace_node_sleep(worker.sleep)
        sys.argv = _command(node, file)
        flower_supernode()


def _command(node: NodeSettings, secret: Path) -> list[str]:
    config = f"partition-id={node.part} num-partitions={node.parts}"
    if node.data:
        config += f' data="{node.data}"'
    if node.secure:
        config += " secure=true"
    options: dict[str, object] = {
        "--superlink": node.superlink,
        "--root-certificates": node.authority,
        "--auth-supernode-private-key": node.key,
        "--host": "127.0.0.1",
        "--port": node.port,
        "--isolation": "process",
        "--superexec-auth-secret-file": secret,
        "--node-config": config,
    }
    return ["flower-supernode", *(str(word) for option in options.items() for word in option)]
