"""Measure a federation on loopback: seconds of an exchange, a round, the start and the end; bytes.

Beside it plain Flower FedAvg on plain SuperNodes, on the same machine in the same run. Writes
docs/flower-table.json and a page made of it, docs/flower-table.md. Nobody else should be using the
machine meanwhile.

    python tools/measure/flower.py [--small] [--out docs/flower-table.json]
"""

import argparse
import asyncio
import json
import math
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import flwr
from flwr.app import Message

from feddkd import Experiment
from feddkd.flower.apps import engine_on
from feddkd.flower.deployment.local_federation import deployed
from feddkd.flower.deployment.processes import Processes, free_port
from feddkd.runs.record import find
from feddkd.runs.runner import execute

HERE = Path(__file__).parent
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
}
METHOD = "fedavg(epochs=1, batch_size=32, lr=0.1) | dkd(steps={steps}, batch_size=32, lr=0.2)"
HIDDEN = 4096  # 307,210 numbers: 1,228,840 bytes
STEPS = 10  # J
PATIENCE = 180.0  # seconds for an exchange, or for the nodes to join


class Timed:
    """A Grid that times exchanges, from the push to the last answer."""

    def __init__(self, grid: Any) -> None:
        self._grid = grid
        self.seconds: list[float] = []
        self._waiting: set[str] = set()
        self._begun = 0.0

    def push_messages(self, messages: Sequence[Message]) -> Iterable[str]:
        self._begun = time.perf_counter()
        numbers = list(self._grid.push_messages(messages))
        self._waiting = set(numbers)
        return numbers

    def pull_messages(self, numbers: Iterable[str]) -> Iterable[Message]:
        found = list(self._grid.pull_messages(numbers))
        self._waiting -= {message.metadata.reply_to_message_id for message in found}
        if found and not self._waiting:
            self.seconds.append(round(time.perf_counter() - self._begun, 4))
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)


class Counting:
    """Stands between the nodes and a SuperLink, passes on what they say and counts it: TLS,
    headers, polls, everything.
    """

    def __init__(self) -> None:
        self.up = self.down = 0  # bytes from the nodes, and to them
        self._ready = threading.Event()

    def way(self, port: int) -> int:
        """Return the port at which nodes find the SuperLink from now on."""
        own = free_port()
        threading.Thread(target=lambda: asyncio.run(self._serve(own, port)), daemon=True).start()
        self._ready.wait(10)
        return own

    async def _serve(self, own: int, port: int) -> None:
        async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(
                self._carry("up", reader, there[1]), self._carry("down", there[0], writer)
            )

        async with await asyncio.start_server(between, "127.0.0.1", own) as server:
            self._ready.set()
            await server.serve_forever()

    async def _carry(
        self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(ConnectionError):
            while content := await reader.read(1 << 16):
                setattr(self, name, getattr(self, name) + len(content))
                writer.write(content)
                await writer.drain()
        writer.close()


def measure(
    nodes: int, rounds: int, steps: int, counting: Counting | None = None
) -> dict[str, Any]:
    """Run FedDKD on a number of nodes; each is one client with a part of the digits."""
    method, model = METHOD.format(steps=steps), f"mlp(hidden='{HIDDEN}')"
    experiment = Experiment(
        method=method, clients=nodes, rounds=rounds, partition="iid()", model=model
    )
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        with deployed(nodes, way=counting.way if counting else lambda port: port) as deployment:
            with deployment.link.run() as grid:
                deployment.wait(grid, PATIENCE)
                up, timed = time.perf_counter() - start, Timed(grid)
                before = (counting.up, counting.down) if counting else (0, 0)
                engine = engine_on(
                    timed, experiment, secure=False, join=PATIENCE, deadline=PATIENCE
                )
                execute([experiment], out=Path(name), engine=engine)
            wire = [counting.up - before[0], counting.down - before[1]] if counting else []
            leaving = time.perf_counter()
        down = time.perf_counter() - leaving
        (record,) = find(Path(name))
    if any("missing" in row for row in record.history):
        raise SystemExit(
            f"a node has not answered within {PATIENCE:g} s: the machine is too busy to measure"
            " anything"
        )
    last = record.history[-1]
    return {
        # the first is the question who is there
        "nodes": nodes,
        "steps": steps,
        "exchanges": timed.seconds[1:],
        "rounds": [round(line, 3) for line in record.timings],
        "up": round(up, 2),
        "down": round(down, 2),
        "wire": wire,
        "counted": [last["bytes_up"], last["bytes_down"]],
    }


def plain(nodes: int, rounds: int) -> list[float]:
    """Seconds of each round of Flower's own FedAvg, one exchange a round, on Flower's own
    SuperNodes without TLS.
    """
    tools, port = Path(sys.executable).parent, free_port()
    with tempfile.TemporaryDirectory() as name, Processes(Path(name)) as processes:
        folder, out = Path(name), Path(name) / "times.json"
        (folder / "config.toml").write_text(
            f'[superlink.lab]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
        )
        quiet = {
            **QUIET,
            "FLWR_HOME": name,
            "OMP_NUM_THREADS": "1",
            "PATH": f"{tools}:{os.environ['PATH']}",
        }
        processes.start(
            "superlink", [tools / "flower-superlink", "--insecure", "--port", port], quiet
        )
        for part in range(nodes):
            config = ["--node-config", f"partition-id={part} num-partitions={nodes}"]
            superlink = ["--insecure", "--superlink", f"127.0.0.1:{port}", "--port", free_port()]
            processes.start(f"node{part}", [tools / "flower-supernode", *superlink, *config], quiet)
        time.sleep(10)  # for the SuperLink; the strategy waits for the nodes itself
        told = f'out="{out}" rounds={rounds} nodes={nodes} hidden={HIDDEN}'
        processes.start(
            "run",
            [tools / "flwr", "run", HERE / "plain_flower", "lab", "--stream", "-c", told],
            quiet,
        )
        limit = time.monotonic() + PATIENCE + 60 * rounds
        while not out.exists():
            processes.check()
            if time.monotonic() > limit:
                raise SystemExit(f"plain Flower has not ended: {processes.log_end('run')}")
            time.sleep(0.2)
        times = json.loads(out.read_text())
    return [round(after - before, 3) for before, after in pairwise(times)]


def page(kept: dict[str, Any]) -> str:
    """The record as a page."""
    rows = [
        [
            "nodes",
            "exchange, median s",
            "95 % s",
            "exchanges",
            "round, median s",
            "up, s",
            "down, s",
        ],
        ["---"] * 7,
    ]
    for one in kept["federations"]:
        seconds = one["exchanges"]
        cells = [
            statistics.median(seconds),
            _quantile(seconds, 0.95),
            len(seconds),
            statistics.median(one["rounds"]),
        ]
        rows.append(
            [
                str(cell)
                for cell in (
                    one["nodes"],
                    *(round(cell, 2) for cell in cells),
                    one["up"],
                    one["down"],
                )
            ]
        )
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    first, own, wire = kept["federations"][0], kept["plain"], kept["wire"]
    facts = {
        "nodes": first["nodes"],
        "steps": first["steps"],
        "ours": statistics.median(first["exchanges"]),
        "plain": statistics.median(own),
        "slowest": max(own),
        "count": len(own),
        "bytes": wire["wire"],
        "more": [
            seen / counted - 1 for seen, counted in zip(wire["wire"], wire["counted"], strict=True)
        ],
    }
    return PAGE.format(table=table, **{**kept, **facts})


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[math.ceil(share * len(values)) - 1]


PAGE = """\
<!-- written by tools/measure/flower.py -->
# What a federation costs

FedDKD with J = {steps} on the digits, a perceptron of 1,228,840 bytes, one client a node, everything on one machine over
loopback, with TLS and node authentication: `{command}`, flwr {flwr}, {cores} cores, load average {load[0]} before and {load[1]}
after it.

{table}
An exchange is timed at the server, from the push to the last answer; a round is {steps} + 1 of them, evaluation and record.
`up`: from nothing to all nodes joined, certificates and keys included. `down`: until no process is left.

**Bytes.** A proxy on loopback between two nodes and the SuperLink counted everything that passed while a run lasted, TLS,
headers, polls and heartbeats included: {bytes[0]:,} bytes up and {bytes[1]:,} down, {more[0]:+.1%} and {more[1]:+.1%} against the
costs in its record.

**Plain Flower** FedAvg, its own strategy on {nodes} plain SuperNodes without TLS, the same network and data, one exchange a
round: median {plain:.2f} s a round, slowest {slowest:.2f} s, {count} rounds; feddkd's exchange took {ours:.2f} s.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--small",
        action="store_true",
        help="two nodes, two steps, two rounds: to see that it works",
    )
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "flower-table.json")
    given = parser.parse_args()
    os.environ |= QUIET
    before, (rounds, steps) = os.getloadavg()[0], (2, 2) if given.small else (3, STEPS)
    kept: dict[str, Any] = {
        "command": "python tools/measure/flower.py" + " --small" * given.small,
        "flwr": flwr.__version__,
    }
    kept["federations"] = [
        measure(nodes, rounds, steps) for nodes in ((2,) if given.small else (2, 4, 8))
    ]
    kept["wire"] = measure(2, 2, steps, Counting())
    kept["plain"] = plain(2, 2 if given.small else 6)
    kept |= {
        "cores": os.cpu_count(),
        "load": [round(load, 1) for load in (before, os.getloadavg()[0])],
    }
    given.out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    given.out.with_suffix(".md").write_text(page(kept), encoding="utf-8")


if __name__ == "__main__":
    main()
