"""The paper's FEMNIST job on the real EMNIST letters.

(That they load, and upright, is in test_sources.py.)
"""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from feddkd.experiment import load
from feddkd.runs.prepare import prepare
from feddkd.simulation import Job, Start
from playing import play_job

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("FEDDKD_DATA", ROOT.parent / "shared" / "data"))
pytestmark = pytest.mark.skipif(
    not (DATA / "emnist-letters").is_dir(),
    reason="set FEDDKD_DATA to a folder with emnist-letters/ (see `feddkd data list`)",
)


def test_the_femnist_job_has_the_papers_sizes_and_learns_in_a_step_and_a_distillation() -> None:
    average, feddkd = load(ROOT / "examples" / "femnist.toml")
    prepared = prepare(average, DATA)
    federation = prepared.federation
    assert federation.sizes == [3120] * 20
    assert (len(federation.validation), len(federation.test)) == (12_480, 20_800)
    assert [len(np.unique(federation.y.numpy()[indices])) for indices in federation.train] == [
        6
    ] * 20
    assert federation.shape == (1, 32, 32)
    # the step is the point
    federation = replace(
        federation, validation=federation.validation[::20], test=federation.test[::20]
    )
    short = {"epochs=5": "steps=1", "steps=10": "steps=1"}
    text = feddkd.method
    for old, new in short.items():
        text = text.replace(old, new)
    start = prepared.model.initial(("init", 0))
    method = type(feddkd)(method=text, data="emnist").parsed_method
    job = Job(
        prepared.model,
        method,
        [Start(0, federation, *start)],
        rounds=1,
        cohort=10,
        evaluation=average.judging,
    )
    (run,), (rows,) = play_job(job, "serial")
    assert rows[0]["average_test_loss"] < np.log(26)  # one step of each already beats guessing
    assert rows[0]["communications"] == 2
    assert any(not torch.equal(run.state["params"][name], start[0][name]) for name in start[0])
