"""Kill runs at random moments, and see each go on to the same bits: `make faults`.

A parent that has imported everything forks a child for every run, so that a cycle takes as long as
the run and not as long as the start of Python. After each SIGKILL a copy of the folder is run to
its end and compared, file by file, with an undisturbed run; then the same folder is taken
up again, to be killed further on, until it is finished and a new one begins.
"""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path

import torch

from feddkd.runs.runner import execute
from interrupted import ENGINES, METHODS, OFTEN, content, experiment

SEED = int(sys.argv[2]) if sys.argv[2:] else 0
SOON = 2.0  # seconds in which the workers of a killed process must have ended


def start(method: str, engine: str, out: Path) -> int:
    """Start a child that runs or continues two seeds of a method; return its process id."""
    child = os.fork()
    if child:
        return child
    try:
        os.setpgid(0, 0)  # workers are in the same group
        runs = [experiment(METHODS[method], seed=seed, split_seed=0) for seed in (0, 1)]
        execute(runs, out=out, every=OFTEN, **ENGINES[engine])
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)


def finish(method: str, engine: str, out: Path) -> dict[str, bytes]:
    _, status = os.waitpid(start(method, engine, out), 0)
    if status:
        sys.exit(f"{method} on {engine} did not continue (seed {SEED}); its files are in {out}")
    return content(out)


def kill(method: str, engine: str, out: Path, after: float) -> bool:
    """Kill a run after some seconds; return whether it was still running."""
    child = start(method, engine, out)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    until = time.perf_counter() + SOON
    while left := living(child):
        if time.perf_counter() > until:
            sys.exit(f"{method} on {engine}: processes {left} outlive their parent (seed {SEED})")
        time.sleep(0.02)
    return os.WIFSIGNALED(status)


def living(group: int) -> list[str]:
    """Return the processes of a group that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            state, _, its_group, *_ = path.read_text().rsplit(")", 1)[1].split()
            if state != "Z" and its_group == str(group):
                found.append(path.parent.name)
    return found


def main(kills: int) -> None:
    torch.set_num_threads(1)
    began, dice, done, checkpoints = time.perf_counter(), random.Random(SEED), 0, 0
    place = Path(tempfile.mkdtemp(prefix="sigkills-"))
    # children find data and libraries ready: much of what a run needs is imported with its first
    # gradient
    execute([experiment(rounds=1)], out=place / "first", engine="serial")
    whole: dict[tuple[str, str], dict[str, bytes]] = {}
    seconds: dict[tuple[str, str], float] = {}
    cells = list(
        islice(
            zip(cycle(METHODS), cycle(ENGINES)),
            min(len(METHODS) * len(ENGINES), max(3, kills // 8)),
        )
    )
    for method, engine in cycle(cells):
        cell, cut = (method, engine), place / f"{method} {engine}"
        if cell not in whole:
            started = time.perf_counter()
            whole[cell] = finish(method, engine, place / "whole" / method / engine)
            seconds[cell] = time.perf_counter() - started
        if not kill(method, engine, cut, dice.uniform(0, seconds[cell])):
            shutil.rmtree(cut)  # it was finished before the moment came
            continue
        done += 1
        checkpoints += any(cut.rglob("round-*.json"))
        if cut.exists():
            shutil.copytree(cut, place / "copy")
        if finish(method, engine, place / "copy") != whole[cell]:
            sys.exit(
                f"kill {done} (seed {SEED}): {method} on {engine} ended in other bits; {cut} and"
                f" {place / 'copy'} have both"
            )
        shutil.rmtree(place / "copy")
        if done == kills:
            break
    shutil.rmtree(place)
    print(
        f"{done} SIGKILLs, seed {SEED}, over {len({m for m, _ in cells})} methods and"
        f" {len({e for _, e in cells})} engines, {checkpoints} of them after a checkpoint: each"
        f" resumed to the identical record and weights, in {time.perf_counter() - began:.0f} s"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 120)
