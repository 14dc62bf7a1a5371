"""The server's part of a deployment: Flower's SuperLink in its own process, the ServerApp in this.

The SuperLink is configured to start no processes, so code that reaches it is not run. This process
takes the run's task with a secret, so progress, signals and errors are those of any other run.
"""

import hashlib
import json
import secrets
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import httpx
from flwr.serverapp import Grid

from feddkd.errors import InputError, NobodyAnsweredError
from feddkd.flower.deployment import gateway
from feddkd.flower.deployment.credentials import (
    AUTHORITY,
    CERTIFICATE,
    PRIVATE,
    check_validity,
)
from feddkd.flower.deployment.processes import Processes, check_free
from feddkd.flower.deployment.supernode import send_heartbeat
from feddkd.flower.flwr_internals import (
    AcquireTaskRequest,
    CliClientHttpInterceptor,
    ControlHttpClient,
    Fab,
    HeartbeatSender,
    HttpGrid,
    ListNodesRequest,
    ProtobufClient,
    ProtobufClientInterceptor,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    RegisterNodeRequest,
    RuntimeHttpClient,
    RuntimeVersionHttpInterceptor,
    StartRunRequest,
    SuperExecAuthHttpInterceptor,
    TaskIdentity,
    TaskType,
    build_fab_from_files,
    fab_to_proto,
    limit_retries,
    retry_content_sooner,
    run_from_proto,
    runtime_client,
    stop_retrying,
)
from feddkd.flower.wire import MOST
from feddkd.runs.files import put
from feddkd.version import __version__

Client = TypeVar("Client", bound=ProtobufClient)
READY = 30.0  # seconds for a SuperLink to start, or to answer again
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
    """A SuperLink on this machine, and the requests to it.

    Its folder holds its certificate, its key and, if `lasting`, its database.
    """

    folder: Path
    processes: Processes
    port: int
    host: str = "127.0.0.1"  # the address that it listens on
    lasting: bool = False  # True: it still knows its nodes after a restart
    _keys: dict[int, bytes] = field(default_factory=dict)  # node -> its public key
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))

    def start(self) -> None:
        """Start the SuperLink with TLS and node authentication; return when it answers."""
        check_free(self.host, self.port)
        check_validity(self.folder)
        put(self.folder / gateway.MEMBERS, b"{}")
        file = self.folder / "superexec.secret"
        file.touch(mode=0o600)
        file.write_bytes(self._secret)
        options: dict[str, object] = {
            "--host": self.host,
            "--port": self.port,
            "--ssl-certfile": self.folder / CERTIFICATE,
            "--ssl-keyfile": self.folder / PRIVATE,
            "--ssl-ca-certfile": self.folder / AUTHORITY,
            "--isolation": "process",
            "--superexec-auth-secret-file": file,
        }
        if self.lasting:
            options["--database"] = self.folder / "superlink.db"
        flags = ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        words = [word for option in options.items() for word in option]
        command = [sys.executable, "-P", gateway.__file__, MOST + MORE]
        command += [self.folder / gateway.MEMBERS, __version__, *words, *flags]
        self.processes.start("superlink", command, {"FLWR_HOME": str(self.folder)})
        self._wait()

    def admit(self, keys: Mapping[bytes, str]) -> None:
        """Let exactly the nodes with these public keys join; the values are their names."""
        members = {hashlib.sha256(key).hexdigest(): name for key, name in keys.items()}
        put(self.folder / gateway.MEMBERS, json.dumps(members).encode())
        with closing(self._control()) as control:
            for key, name in keys.items():
                try:
                    control.RegisterNode(RegisterNodeRequest(public_key=key))
                except httpx.HTTPStatusError as error:
                    if "already in use" not in error.response.text:
                        raise InputError(
                            f"the SuperLink refused the key {name}: {error.response.text}"
                        ) from None

    def key_of(self, node: int) -> bytes:
        """Return the public key of a node; nothing if there is no such node."""
        if node not in self._keys:
            with closing(self._control()) as control:
                found = control.ListNodes(ListNodesRequest()).nodes_info
            self._keys |= {info.node_id: info.public_key for info in found}
        return self._keys.get(node, b"")

    @contextmanager
    def run(self) -> Iterator[Grid]:
        """Start a Flower run and yield its Grid: the caller is the run's ServerApp."""
        with closing(self._control()) as control:
            content, _ = build_fab_from_files({"pyproject.toml": PYPROJECT.encode()})
            fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
            number = control.StartRun(StartRunRequest(fab=fab_to_proto(fab))).run_id
        grid = HttpGrid(self._address, False, self._authority, token=self._token(number))
        retry_content_sooner()
        limit_retries(grid, READY)
        client = runtime_client(grid)  # made before the heartbeat's thread would make another
        heartbeats = HeartbeatSender(lambda: send_heartbeat(client))
        heartbeats.start()
        task = client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id = task.task_id
        TaskIdentity.run_id = task.run.run_id
        TaskIdentity.node_id = task.context.node_id
        grid.set_run(run_from_proto(task.run))
        status, why = "failed", "ended early"
        try:
            yield grid
            status, why = "completed", ""
        except httpx.TransportError as error:
            raise NobodyAnsweredError(
                f"the SuperLink has not answered for {READY:g} s: {error}"
            ) from None
        except httpx.HTTPStatusError as error:
            raise NobodyAnsweredError(
                f"the SuperLink has failed ({error.response.status_code} at"
                f" {error.request.url.path}); {self.folder / 'superlink.log'} says why"
            ) from None
        finally:
            stop_retrying(grid)
            heartbeats.stop()
            with suppress(httpx.HTTPError):  # the SuperLink may have ended
                client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=why))
            grid.close()

    def _token(self, run: int) -> str:
        """Take the run's task and return its token; tasks of other runs are left alone."""
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
                acquired = client.AcquireTask(
                    AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
                )
                if acquired.token and acquired.task.run_id == run:
                    return str(acquired.token)
                time.sleep(0.05)
        raise InputError(f"the SuperLink has not started run {run} within {READY:g} s")

    @property
    def _address(self) -> str:
        """The address that this machine uses to reach the SuperLink."""
        return f"{'127.0.0.1' if self.host == '0.0.0.0' else self.host}:{self.port}"

    @property
    def _authority(self) -> bytes:
        return (self.folder / AUTHORITY).read_bytes()

    def _control(self) -> ControlHttpClient:
        version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
        secret = gateway.SecretHeader(self._secret)
        return self._open(ControlHttpClient, CliClientHttpInterceptor(), version, secret)

    def _open(self, kind: type[Client], *interceptors: ProtobufClientInterceptor) -> Client:
        return kind.from_server_address(self._address, False, self._authority, list(interceptors))

    def _wait(self) -> None:
        """Wait until the SuperLink answers, or raise InputError with the end of its log."""
        url, limit = f"https://{self._address}/health", time.monotonic() + READY
        trust = ssl.create_default_context(cafile=self.folder / AUTHORITY)
        while time.monotonic() < limit:
            self.processes.check()
            try:
                urllib.request.urlopen(url, timeout=5, context=trust).close()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise InputError(
            f"the SuperLink has not started within {READY:g} s:"
            f" {self.processes.log_end('superlink')}"
        )
