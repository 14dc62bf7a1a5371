"""Small runs to be cut short, and what they leave: for test_resume.py and sigkills.py."""

import json
from pathlib import Path
from typing import Any

from feddkd import Experiment
from feddkd.runs.session import Every

METHODS = {
    "dkd": "fedavg(epochs=1, batch_size=32) | dkd(steps=2, momentum=0.5)",
    "auto": "fedavg(epochs=1, batch_size=32) | dkd(steps='auto', limit=3)",
    "kept with the client": "scaffold(epochs=1, batch_size=32) | dkd(steps=2)",
    "own models": "feddistill(epochs=1, batch_size=32)",
    "noise": (
        "fedavg(epochs=1, batch_size=32, clip=0.5, noise=4.0) | dkd(steps=2, clip=0.5, noise=9.0)"
    ),
    "not sent yet": "fedavg(epochs=1, batch_size=32) | dkd(steps=2) | topk(share=0.1)",
    "last update": (
        "fedavg(epochs=1, batch_size=32, gather='centred', radius=0.1)"
        " | dkd(steps=2, gather='centred', radius=0.1)"
    ),
}
OFTEN = Every(rounds=1)
ENGINES: dict[str, dict[str, Any]] = {
    "serial": {"engine": "serial"},
    "pool": {"engine": "pool"},
    # one chosen by timing might be another one next time
    "batched": {"engine": "batched", "options": {"strategy": "vmap"}},
}


def experiment(method: str = METHODS["dkd"], **keys: Any) -> Experiment:
    tiny = {
        "partition": "dirichlet(alpha=0.5)",
        "model": "mlp(hidden='8')",
        "clients": 5,
        "cohort": 2,
        "rounds": 6,
    }
    return Experiment(**{"method": method, **tiny, **keys})


def pair() -> list[Experiment]:
    """Two seeds that leave time for a signal."""
    return [
        experiment(METHODS["kept with the client"], rounds=12, seed=seed, split_seed=0)
        for seed in (0, 1)
    ]


def content(out: Path) -> dict[str, bytes]:
    """All files of all runs but those that tell the time."""
    found = [
        path
        for path in sorted(out.rglob("*"))
        if path.is_file() and path.name not in ("manifest.json", "timings.jsonl", "seal.jsonl")
    ]
    texts = {str(path.relative_to(out)): path.read_bytes() for path in found}
    return {
        name: _without_time(text) if name.endswith("summary.json") else text
        for name, text in texts.items()
    }


def _without_time(summary: bytes) -> bytes:
    return json.dumps({**json.loads(summary), "seconds": 0}).encode()
