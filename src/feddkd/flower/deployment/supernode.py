"""A SuperNode and its clients in one process that stays.

Flower starts a process for every message: seconds of imports for milliseconds of work. Here the
SuperNode is Flower's own, but whenever it would sleep it looks for a task, which a thread does on
the spot, with network and data still in memory. And no code that a server sends is run: the app is
this package's, the data loader the operator's.
"""

import logging
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import httpx
from flwr.app import Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.runtime_pb2 import AcquireTaskRequest, SendTaskHeartbeatRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode import start_client_internal
from flwr.supernode.cli.flower_supernode import flower_supernode
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from feddkd.flower.deployment.processes import check_free
from feddkd.flower.messages import hasten

log = logging.getLogger(__name__)

QUICKEST, SLOWEST = 0.05, 3.0  # seconds between two looks for a message
# seconds that Flower's SuperNode would sleep while a message is answered; when it has pulled none
# they are 3
ANSWERING = 0.5


class TaskWorker:
    """Does a SuperNode's tasks in its own process, in place of the SuperExec that would start one
    for each.
    """

    def __init__(self, address: str, secret: bytes, app: ClientApp) -> None:
        self._address, self._app = address, app
        sign = SuperExecAuthHttpInterceptor(
            master_secret=secret, protected_methods=frozenset({"/flwr.proto.Runtime/AcquireTask"})
        )
        self._door = self._client(sign)
        self._busy = time.monotonic()  # when there was something to do
        # Flower begins every run with nothing; a server that resumes begins a new one
        self._kept = RecordDict()
        # a node's clients share what is kept: two at once would undo each other
        self._turn = threading.Lock()

    def sleep(self, seconds: float) -> None:
        """In place of the SuperNode's sleep: look for a task, then nap; the nap is short as long as
        there was work of late.

        If no message was pulled, a task is left over from a run that ended while its message came.
        The SuperNode sends one answer for each message that it pulls: one to this would take the
        place of the next.
        """
        given = self._door.AcquireTask(
            AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
        )
        if given.token:
            self._busy = time.monotonic()
            # a thread, since tasks of a run that ended meanwhile wait for ever for what never comes
            threading.Thread(
                target=self._work, args=(given.token, seconds <= ANSWERING), daemon=True
            ).start()
        time.sleep(min(seconds, max(QUICKEST, (time.monotonic() - self._busy) / 100), SLOWEST))

    def _work(self, token: str, wanted: bool) -> None:
        with closing(self._client(RuntimeTokenHttpInterceptor(token))) as desk:
            heart = HeartbeatSender(lambda: beat(desk))
            heart.start()
            try:
                self._answer(desk, wanted)
            except Exception as error:  # Flower gives the task up when its time is over
                log.warning("a task could not be done: %s", error)
            finally:
                heart.stop()

    def _answer(self, desk: RuntimeHttpClient, wanted: bool) -> None:
        message, context, _, _ = pull_task_input(desk)
        if not wanted:
            return push_task_output(desk, context, "failed", "its run has ended")
        status, why = "completed", ""
        try:
            with self._turn:
                context.state = RecordDict({**self._kept})
                reply = self._app(message, context)
                self._kept = context.state
        except Exception as error:
            log.warning("%s", error, exc_info=True)
            status, why = "failed", f"{type(error).__name__}: {error}"
            reply = Message(Error(code=2, reason=why), reply_to=message)
        push_message(desk, reply, context)
        push_task_output(desk, context, status, why)

    def _client(self, *interceptors: ProtobufClientInterceptor) -> RuntimeHttpClient:
        every = [RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"), *interceptors]
        return RuntimeHttpClient.from_server_address(self._address, True, None, every)


def beat(desk: RuntimeHttpClient) -> bool:
    """A sign of life while a task takes long."""
    try:
        desk.SendTaskHeartbeat(SendTaskHeartbeatRequest())
    except httpx.HTTPError:
        return False
    return True


def run_node(
    app: ClientApp,
    superlink: str,
    port: int,
    key: Path,
    authority: Path,
    part: int,
    parts: int,
    data: Path | None,
    secure: bool,
) -> None:
    """Be a SuperNode until somebody ends it.

    Its own port is for this process alone: whoever else asks there lacks the secret.
    """
    check_free("127.0.0.1", port)
    hasten()
    with TemporaryDirectory(prefix="feddkd-") as folder:
        secret, file = secrets.token_bytes(32), Path(folder) / "secret"
        file.touch(mode=0o600)
        file.write_bytes(secret)
        worker = TaskWorker(f"127.0.0.1:{port}", secret, app)
        start_client_internal.time = SimpleNamespace(sleep=worker.sleep)  # type: ignore[assignment, attr-defined]
        sys.argv = _command(superlink, port, key, authority, part, parts, data, secure, file)
        flower_supernode()


def _command(
    superlink: str,
    port: int,
    key: Path,
    authority: Path,
    part: int,
    parts: int,
    data: Path | None,
    secure: bool,
    secret: Path,
) -> list[str]:
    config = (
        f"partition-id={part} num-partitions={parts}"
        + (f' data="{data}"' if data else "")
        + " secure=true" * secure
    )
    given: Sequence[tuple[str, object]] = [
        ("--superlink", superlink),
        ("--root-certificates", authority),
        ("--auth-supernode-private-key", key),
        ("--host", "127.0.0.1"),
        ("--port", port),
        ("--isolation", "process"),
        ("--superexec-auth-secret-file", secret),
        ("--node-config", config),
    ]
    return ["flower-supernode", *(str(word) for pair in given for word in pair)]
