"""A federation on one machine:

certificates, keys, a SuperLink, nodes; made for a while, and gone without a trace.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flwr.serverapp import Grid

from feddkd.flower.deployment.credentials import AUTHORITY, make_node, make_server
from feddkd.flower.deployment.processes import Processes, free_port
from feddkd.flower.deployment.superlink import Superlink


@dataclass(frozen=True)
class Deployment:
    """What is running."""

    folder: Path
    link: Superlink
    processes: Processes
    nodes: int
    data: Path | None
    secure: bool  # whether nodes upload nothing that is not masked
    port: int  # at which nodes find the SuperLink

    def start_node(self, part: int) -> None:
        """One node of the federation; also one that was ended: it is the same node again, since its
        key is.
        """
        more = [
            *(["--data", self.data] if self.data else []),
            *(["--secure"] if self.secure else []),
        ]
        self.processes.start(
            f"node{part}",
            [
                sys.executable,
                "-m",
                "feddkd.cli",
                "flower",
                "client",
                f"127.0.0.1:{self.port}",
                "--threads",
                "1",
                "--port",
                str(free_port()),
                "--key",
                self.folder / f"node{part}",
                "--authority",
                self.folder / AUTHORITY,
                "--part",
                str(part),
                "--parts",
                str(self.nodes),
                *more,
            ],
            {"OMP_NUM_THREADS": "1", "FLWR_HOME": str(self.folder)},
        )

    def wait(self, grid: Grid, seconds: float) -> None:
        """Until all nodes are there; one that has given up before is an error, with its last words."""
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
    way: Callable[[int], int] = lambda port: port,
) -> Iterator[Deployment]:
    """A federation on this machine, for as long as the block lasts.

    `way`: a port that leads nodes to the SuperLink's.
    """
    with tempfile.TemporaryDirectory(prefix="feddkd-") as name, Processes(Path(name)) as processes:
        folder = Path(name)
        make_server(folder, ["localhost"])
        link = Superlink(folder, processes, free_port())
        for part in range(nodes):
            make_node(folder / f"node{part}")
        link.start()
        deployment = Deployment(folder, link, processes, nodes, data, secure, way(link.port))
        try:
            for part in range(nodes):
                link.register(folder / f"node{part}.pub")
                deployment.start_node(part)
            yield deployment
        finally:  # before the SuperLink: a node that leaves tells it so
            processes.end(*(name for name in processes.running if name.startswith("node")))
