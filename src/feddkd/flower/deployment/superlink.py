"""The server's end of a deployment: Flower's SuperLink as a process, and its ServerApp here.

The SuperLink is told to start nothing by itself, so code that reaches it is not run; the run's task
is taken by this process, which shows a secret of its own. Progress, signals and errors are then
those of any other run.
"""

import hashlib
import secrets
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import httpx
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.cli.build import build_fab_from_files
from flwr.cli.cli_client_interceptor import CliClientHttpInterceptor
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest, PushTaskOutputRequest
from flwr.serverapp import Grid
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufClient, ProtobufClientInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

from feddkd.errors import InputError, NobodyAnsweredError
from feddkd.flower.deployment import gateway
from feddkd.flower.deployment.credentials import AUTHORITY, CERTIFICATE, PRIVATE
from feddkd.flower.deployment.processes import Processes, check_free
from feddkd.flower.deployment.supernode import beat
from feddkd.flower.messages import bound
from feddkd.flower.wire import MOST

Client = TypeVar("Client", bound=ProtobufClient)
READY = 30.0  # seconds for a SuperLink to come up, or back
MORE = 1 << 20  # bytes of a request besides the tensors
PYPROJECT = """\
[project]
name = "feddkd-app"
version = "1.0.0"
description = "An experiment of feddkd"
license = "Apache-2.0"
dependencies = ["feddkd[flower]"]

[tool.flwr.app]
publisher = "feddkd"

[tool.flwr.app.components]
serverapp = "feddkd.flower.apps:server"
clientapp = "feddkd.flower.apps:client"
"""


@dataclass
class Superlink:
    """A SuperLink on this machine, and how to talk to it.

    Its folder holds certificate, key and, if asked for, its memory.
    """

    folder: Path
    processes: Processes
    port: int
    host: str = "127.0.0.1"  # where it listens
    lasting: bool = False  # whether it remembers nodes in its folder when it is started again
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))

    def start(self) -> None:
        """With TLS and nodes that must show who they are; returns once it answers."""
        check_free(self.host, self.port)
        file = self.folder / "superexec.secret"
        file.touch(mode=0o600)
        file.write_bytes(self._secret)
        memory = ["--database", self.folder / "superlink.db"] if self.lasting else []
        self.processes.start(
            "superlink",
            [
                sys.executable,
                "-P",
                gateway.__file__,
                MOST + MORE,
                "--host",
                self.host,
                "--port",
                str(self.port),
                "--ssl-certfile",
                self.folder / CERTIFICATE,
                "--ssl-keyfile",
                self.folder / PRIVATE,
                "--ssl-ca-certfile",
                self.folder / AUTHORITY,
                "--enable-supernode-auth",
                "--isolation",
                "process",
                "--superexec-auth-secret-file",
                file,
                "--disable-runtime-dependency-installation",
                *memory,
            ],
            {"FLWR_HOME": str(self.folder)},
        )
        self._wait()

    def register(self, public_key: Path) -> None:
        """Let a node join that has the private half of this key; one that may join already still
        may.
        """
        with closing(self._control()) as control:
            try:
                control.RegisterNode(RegisterNodeRequest(public_key=_pem(public_key)))
            except httpx.HTTPStatusError as error:
                if "already in use" not in error.response.text:
                    raise InputError(
                        f"the key {public_key} was refused: {error.response.text}"
                    ) from None

    @contextmanager
    def run(self) -> Iterator[Grid]:
        """A Flower run whose ServerApp is whoever holds this Grid."""
        with closing(self._control()) as control:
            content, _ = build_fab_from_files({"pyproject.toml": PYPROJECT.encode()})
            fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
            number = control.StartRun(StartRunRequest(fab=fab_to_proto(fab))).run_id
        grid = HttpGrid(self._address, False, self._authority, token=self._token(number))
        bound(grid, READY)
        client = grid._runtime_client  # made here and not by the thread below as well
        heart = HeartbeatSender(lambda: beat(client))
        heart.start()
        given = client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = (
            given.task_id,
            given.run.run_id,
            given.context.node_id,
        )
        grid.set_run(run_from_proto(given.run))
        status, why = "failed", "ended early"
        try:
            yield grid
            status, why = "completed", ""
        except httpx.TransportError as error:
            raise NobodyAnsweredError(
                f"the SuperLink has not answered for {READY:g} s: {error}"
            ) from None
        finally:
            grid._retry_invoker.max_tries = 1
            heart.stop()
            with suppress(httpx.HTTPError):  # a SuperLink that is gone needs no telling
                client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=why))
            grid.close()

    def _token(self, run: int) -> str:
        """Take the run's task. Runs that somebody else may have begun are not ours to do."""
        sign = SuperExecAuthHttpInterceptor(
            master_secret=self._secret,
            protected_methods=frozenset({"/flwr.proto.Runtime/AcquireTask"}),
        )
        with closing(
            self._open(
                RuntimeHttpClient, RuntimeVersionHttpInterceptor(component_name="SuperExec"), sign
            )
        ) as client:
            limit = time.monotonic() + READY
            while time.monotonic() < limit:
                given = client.AcquireTask(
                    AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
                )
                if given.token and given.task.run_id == run:
                    return str(given.token)
                time.sleep(0.05)
        raise InputError(f"the SuperLink has not begun run {run} within {READY:g} s")

    @property
    def _address(self) -> str:
        """How this machine itself reaches it."""
        return f"{'127.0.0.1' if self.host == '0.0.0.0' else self.host}:{self.port}"

    @property
    def _authority(self) -> bytes:
        return (self.folder / AUTHORITY).read_bytes()

    def _control(self) -> ControlHttpClient:
        version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
        return self._open(
            ControlHttpClient, CliClientHttpInterceptor(), version, gateway.Key(self._secret)
        )

    def _open(self, kind: type[Client], *interceptors: ProtobufClientInterceptor) -> Client:
        return kind.from_server_address(self._address, False, self._authority, list(interceptors))

    def _wait(self) -> None:
        trust, limit = (
            ssl.create_default_context(cafile=self.folder / AUTHORITY),
            time.monotonic() + READY,
        )
        while time.monotonic() < limit:
            self.processes.check()
            try:
                urllib.request.urlopen(
                    f"https://{self._address}/health", timeout=5, context=trust
                ).close()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise InputError(
            f"the SuperLink has not come up within {READY:g} s:"
            f" {self.processes.last_words('superlink')}"
        )


def _pem(public_key: Path) -> bytes:
    try:
        return load_ssh_public_key(public_key.read_bytes()).public_bytes(
            Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
        )
    except (OSError, ValueError) as error:
        raise InputError(f"no public key in {public_key}: {error}") from None
