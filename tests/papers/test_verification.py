"""Recorded rounds that are played again: the true ones hold, and changed ones do not."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commandline import Feddkd
from feddkd.papers.definitions import read
from feddkd.papers.results import RecordedRun, recorded
from feddkd.papers.verification import precision_of, some, verify

SMALL = Path(__file__).parents[2] / "papers" / "small"


@pytest.fixture(scope="module")
def run() -> RecordedRun:
    """A run of four rounds with DKD, in float64."""
    runs = recorded(read(SMALL)).values()
    return next(one for one in runs if len(one.rounds) == 4 and "dkd" in one.experiment.method)


def changed(run: RecordedRun, **values: Any) -> RecordedRun:
    return replace(run, rounds=[{**run.rounds[0], **values}, *run.rounds[1:]])


def test_a_record_comes_out_again(run: RecordedRun) -> None:
    found = verify(run, 2, None, "serial")
    assert (found.holds, found.differs, found.rounds) == (True, (), 2)


@pytest.mark.parametrize(
    ("key", "value"),
    [("clients", [0, 1, 2, 3, 4]), ("local_steps", 1.0), ("bytes_up", 7), ("communications", 99)],
)
def test_a_changed_cohort_or_cost_is_named(run: RecordedRun, key: str, value: Any) -> None:
    assert run.rounds[0][key] != value
    found = verify(changed(run, **{key: value}), 1, None, "serial")
    assert (found.holds, found.differs) == (False, (f"{key} of round 1",))


def test_a_changed_accuracy_or_division_does_not_hold(run: RecordedRun) -> None:
    wrong = verify(changed(run, test_accuracy=run.rounds[0]["test_accuracy"] + 1e-3), 1, None)
    assert (wrong.holds, wrong.differs) == (False, ())
    assert wrong.difference == pytest.approx(1e-3)
    partition = {"partition": {**run.manifest["partition"], "digest": "0" * 64}}
    other = replace(run, manifest={**run.manifest, **partition})
    assert verify(other, 1, None, "serial").differs == ("partition",)


@pytest.mark.parametrize(
    ("manifest", "precision"),
    [
        ({"precision": "bf16", "command": ["--precision", "fp32"]}, "bf16"),
        ({"command": ["feddkd", "run", "--precision", "bf16"]}, "bf16"),
        ({"hardware": {"device": "NVIDIA H200"}}, "tf32"),
        ({"hardware": {"device": "cpu"}}, "fp32"),
    ],
)
def test_the_precision_of_old_records_is_found(
    run: RecordedRun, manifest: dict[str, Any], precision: str
) -> None:
    single = {**run.manifest["experiment"], "dtype": "float32"}
    assert precision_of(RecordedRun({"experiment": single, **manifest}, 1.0, [])) == precision
    assert precision_of(run) == "fp64"


def test_the_same_seed_chooses_the_same_runs() -> None:
    runs = list(recorded(read(SMALL)).values())
    first, again, other = (
        [run.experiment.digest for run in some(chosen, 3, seed)]
        for chosen, seed in ((runs, 5), (runs[::-1], 5), (runs, 6))
    )
    assert first == again
    assert first != other
    assert len(some(runs, 10_000, 0)) == len(runs)


def test_the_command_says_what_held_and_what_did_not(feddkd: Feddkd, tmp_path: Path) -> None:
    done = feddkd("paper", "verify", "short", "--papers", str(SMALL), "--runs", "1", "--json")
    (found,) = json.loads(done.out.splitlines()[-1])["verified"]
    assert (done.status, found["holds"], found["rounds"]) == (0, True, 1)
    papers = SMALL.parent / "feddkd"
    done = feddkd("paper", "verify", "emnist", "--papers", str(papers), "--runs", "1")
    assert done.status == 2
    assert "left out" in done.out
