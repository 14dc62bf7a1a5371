"""Records of runs that never were, with everything in them that can be recorded."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from feddkd.experiment import Experiment
from feddkd.runs.circumstances import circumstances
from feddkd.runs.description import manifest_of
from feddkd.runs.record import folder_name
from feddkd.runs.recorder import Recorder

METHODS = [
    f"fedavg(lr={lr})" + tail
    for lr in (0.3, 0.2, 0.1, 0.05, 0.03, 0.01)
    for tail in ("", " | dkd()", " | dkd(steps=5)")
]
CLIENTS, CLASSES = 20, 62


def make(out: Path, methods: int, seeds: int, rounds: int) -> None:
    for text in METHODS[:methods]:
        for seed in range(seeds):
            experiment = Experiment(
                method=text, seed=seed, clients=CLIENTS, cohort=0.5, rounds=rounds, target=0.8
            )
            _write(out / folder_name(experiment), experiment)


def _write(folder: Path, experiment: Experiment) -> None:
    draw = np.random.default_rng(int(experiment.digest[:8], 16))
    facts: dict[str, Any] = {
        "data": {"digest": "made up"},
        "partition": {"digest": f"of seed {experiment.seed}"},
    }
    recorder = Recorder(folder)
    recorder.take()
    with closing(recorder):
        around = circumstances("none", torch.device("cpu"))
        recorder.begin({**manifest_of(experiment), **facts, **around})
        for row in _rows(experiment, draw):
            recorder.row(row, 0.1)
        names = [str(label) for label in range(CLASSES)]
        recorder.keep(
            "partition.json",
            {"classes": names, "counts": draw.integers(0, 90, (CLIENTS, CLASSES)).tolist()},
        )
        recorder.keep(
            "confusion.json",
            {"classes": names, "counts": draw.integers(0, 90, (CLASSES, CLASSES)).tolist()},
        )


def _rows(experiment: Experiment, draw: np.random.Generator) -> Iterator[dict[str, Any]]:
    best, dkd = draw.uniform(0.6, 0.9), "dkd" in experiment.method
    for t in range(1, experiment.rounds + 1):
        accuracy = best * (1 - np.exp(-t / 60)) + draw.normal(0, 0.01)
        each, active = (
            draw.uniform(0, 1, CLIENTS).tolist(),
            sorted(draw.choice(CLIENTS, CLIENTS // 2, replace=False).tolist()),
        )
        names = ("L1", "L2", "L2_average", "bound", "bound_average")
        by_client = dict.fromkeys(
            ("client_loss", "client_accuracy", "global_loss", "global_accuracy"),
            each[: CLIENTS // 2],
        )
        yield {
            "round": t,
            "clients": active,
            "test_accuracy": accuracy,
            "validation_accuracy": accuracy,
            "test_loss": 1 - accuracy,
            **({"average_test_accuracy": accuracy - 0.02} if dkd else {}),
            "test_client_accuracy": each,
            "diagnostics": {**{name: float(draw.uniform(0, 1)) for name in names}, **by_client},
            "communications": 11 * t,
            "local_steps": 35.0 * t,
            "bytes_up": 10**6 * t,
            "bytes_down": 10**6 * t,
        }
