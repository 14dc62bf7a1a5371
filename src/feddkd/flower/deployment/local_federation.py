"""A temporary federation on one machine: certificates, keys, a SuperLink and nodes.

Nothing of it is left at the end.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flwr.serverapp import Grid

from feddkd.flower.deployment.credentials import AUTHORITY, make_node, make_server, read_public
from feddkd.flower.deployment.processes import Processes, free_port
from feddkd.flower.deployment.superlink import Superlink


@dataclass(frozen=True)
class Deployment:
    """A federation that runs on this machine."""

    folder: Path
    link: Superlink
    processes: Processes
    nodes: int
    data: Path | None
    secure: bool  # True: the nodes refuse to upload without masks
    port: int  # the port that the nodes connect to
    network: Path | None = None  # the Python file with the network or the task

    def start_node(self, part: int) -> None:
        """Start a node. After a restart it is the same node again, because it has the same key."""
        options: dict[str, object] = {
            "--threads": 1,
            "--port": free_port(),
            "--key": self.folder / f"node{part}",
            "--authority": self.folder / AUTHORITY,
            "--part": part,
            "--parts": self.nodes,
        }
        if self.data:
            options["--data"] = self.data
        if self.network:
            options["--network"] = self.network
        words = [word for option in options.items() for word in option]
        secure = ["--secure"] if self.secure else []
        program = [sys.executable, "-m", "feddkd", "flower", "client"]
        self.processes.start(
            f"node{part}",
            [*program, f"127.0.0.1:{self.port}", *words, *secure],
            {"OMP_NUM_THREADS": "1", "FLWR_HOME": str(self.folder)},
        )

    def wait(self, grid: Grid, seconds: float) -> None:
        """Wait until all nodes are online, or time is up.

        Raise InputError with the end of its log if a node has ended.
        """
        limit = time.monotonic() + seconds
        while len({*grid.get_node_ids()}) < self.nodes and time.monotonic() < limit:
            self.processes.check()
            time.sleep(0.1)


@contextmanager
def deployed(
    nodes: int,
    data: Path | None = None,
    secure: bool = False,
    *,
    network: Path | None = None,
    way: Callable[[int], int] = lambda port: port,
) -> Iterator[Deployment]:
    """Run a federation on this machine until the block ends.

    `way` returns the port that nodes connect to for the SuperLink's port: a proxy, say.
    """
    with tempfile.TemporaryDirectory(prefix="feddkd-") as name, Processes(Path(name)) as processes:
        folder = Path(name)
        make_server(folder, ["localhost"])
        link = Superlink(folder, processes, free_port())
        for part in range(nodes):
            make_node(folder / f"node{part}")
        link.start()
        deployment = Deployment(
            folder, link, processes, nodes, data, secure, way(link.port), network
        )
        try:
            link.admit({read_public(folder / f"node{n}.pub"): f"node{n}" for n in range(nodes)})
            for part in range(nodes):
                deployment.start_node(part)
            yield deployment
        finally:  # before the SuperLink, because a node that leaves reports it there
            processes.end(*(name for name in processes.running if name.startswith("node")))
