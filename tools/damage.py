"""Damage the files of runs in random places, and see each noticed: a part of `make faults`.

Bits are flipped, files cut, their lines swapped and repeated, files copied and removed: in a run
that was cut short, which is then continued, and in a finished one, which is then read. Each must
end in the same record, in a repair that says so, or in a refusal in one line.
"""

import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

from damaged import DAMAGE, finished_run, halted_run, outcome
from interrupted import content

SEED = int(sys.argv[2]) if sys.argv[2:] else 0
SHARES = {"flip": 10}  # flips are this many times as frequent as each other kind


def main(trials: int) -> None:
    torch.set_num_threads(1)
    dice, place = random.Random(SEED), Path(tempfile.mkdtemp(prefix="damage-"))
    runs = {"halted": halted_run(place / "halted"), "finished": finished_run(place / "finished")}
    whole, counts = content(place / "finished"), Counter[tuple[str, str, str]]()
    kinds = [kind for kind in DAMAGE for _ in range(SHARES.get(kind, 1))]
    for trial in range(trials):
        state, kind = dice.choice(list(runs)), dice.choice(kinds)
        out = place / "damaged"
        shutil.copytree(place / state, out)
        files = sorted(path for path in out.rglob("*") if path.is_file() and path.stat().st_size)
        path = dice.choice(files)
        DAMAGE[kind](path, dice)
        try:
            counts[state, kind, outcome(out, whole)] += 1
        except Exception as error:
            sys.exit(f"trial {trial} (seed {SEED}), {kind} of {path}: {error!r}; see {out}")
        shutil.rmtree(out)
    shutil.rmtree(place)
    for (state, kind, what), count in sorted(counts.items()):
        print(f"{state:9} {kind:10} {what:9} {count:6}")
    print(f"{trials} damaged runs, seed {SEED}: no traceback and no silent difference")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 1000)
