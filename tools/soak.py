"""Two thousand rounds of a tiny job, with record and checkpoints: memory must stay flat. `make
soak`.

Resident memory is read after a third of the rounds, when everything has been used once and the pool
has traced its steps, and at the end.
"""

import ctypes
import gc
import sys
import tempfile
import time
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import torch

from feddkd import Experiment
from feddkd.runs.session import Every
from interrupted import ENGINES
from playing import execute as execute_watched

ROUNDS = 2000
# growth of memory between the two readings; a row a round, kept for the summary, is part of it
MOST = 0.03


def resident() -> int:
    """Bytes of memory that this process holds, without what it could give back at once, and its
    workers.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    everybody = ["self", *(worker.pid for worker in active_children())]
    return 4096 * sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in everybody)


def soak(engine: str, rounds: int) -> tuple[int, int]:
    """Resident memory after a third of the rounds and at the end."""
    readings: list[int] = []

    def look(index: int, row: dict[str, Any]) -> None:
        if row["round"] in (rounds // 3, rounds):
            readings.append(resident())

    method = "scaffold(steps=2, batch_size=8) | dkd(steps=1, batch_size=8)"
    tiny = Experiment(
        method, partition="iid()", model="mlp(hidden='4')", clients=6, cohort=3, rounds=rounds
    )
    with tempfile.TemporaryDirectory() as out:
        execute_watched(
            [tiny],
            out=Path(out),
            on_row=look,
            every=Every(rounds=max(rounds // 40, 1)),
            **ENGINES[engine],
        )
    first, last = readings
    return first, last


def main(engine: str, rounds: int) -> None:
    torch.set_num_threads(1)
    started = time.perf_counter()
    first, last = soak(engine, rounds)
    growth = last / first - 1
    print(
        f"{engine}: {rounds} rounds in {time.perf_counter() - started:.0f} s, resident memory "
        f"{first / 2**20:.1f} MiB after a third, {last / 2**20:.1f} MiB at the end ({growth:+.1%})"
    )
    sys.exit(f"memory grew by more than {MOST:.0%}" if growth > MOST else 0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else ROUNDS)
