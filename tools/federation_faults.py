"""Run federations by seed, with faults, and check their laws: `make federation-faults`.

A seed that fails is shown with its history; `--first SEED --seeds 1` plays it again.
"""

import argparse
import logging
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from seeded_federation import BrokenLawError, federate

MEMORY = Path("/dev/shm")  # records are written there: a disk would be the slowest part


def play(seeds: range) -> list[str]:
    """Play the federations of some seeds; return what is wrong with each that breaks a law."""
    logging.disable(logging.CRITICAL)
    wrong = []
    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
        for seed in seeds:
            folder = Path(name) / str(seed)
            folder.mkdir()
            try:
                federate(seed, Path(name), folder)
            except BrokenLawError as error:
                wrong.append(str(error))
    return wrong


def main() -> None:
    """Play the seeds in as many processes as there are cores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    start, last = time.monotonic(), asked.first + asked.seeds
    parts = [range(at, min(at + 50, last)) for at in range(asked.first, last, 50)]
    wrong: list[str] = []
    with ProcessPoolExecutor(asked.processes) as pool:
        for found in pool.map(play, parts):
            for text in found:
                print(text, flush=True)
            wrong += found
    seconds = time.monotonic() - start
    print(f"{asked.seeds} federations in {seconds:.0f} s; {len(wrong)} break a law")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
