"""Each committed record's data, division, first mini-batch and network come out again.

Jobs whose data are not there are skipped: set FEDDKD_DATA to the folder with the official files.
"""

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from feddkd.errors import InputError

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("FEDDKD_DATA", ROOT.parent / "shared" / "data"))


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "traces", ROOT / "tools" / "measure" / "traces.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TRACES = script()
KEPT: dict[str, dict[str, Any]] = json.loads(TRACES.FILE.read_text(encoding="utf-8"))
RUNS = dict(TRACES.jobs())
# what a job needs on disk before its transform, network and split matter
IN_ORDER = sorted(KEPT, key=lambda name: json.loads(name)[0])


def test_every_committed_record_has_the_digests_of_its_jobs_trace() -> None:
    wrong = [
        (run.experiment.digest, key)
        for name in KEPT
        for run in RUNS[name]
        for key in ("data", "partition")
        if run.manifest[key]["digest"] != KEPT[name][key]
    ]
    assert wrong == []
    assert sum(len(RUNS[name]) for name in KEPT) > 600


def test_every_job_has_a_trace() -> None:
    assert sorted(KEPT) == sorted(RUNS), "run tools/measure/traces.py --data DIR"


@pytest.mark.parametrize("name", IN_ORDER)
def test_a_jobs_trace_comes_out_again(name: str) -> None:
    kept = KEPT[name]
    first = next(run for run in RUNS[name] if run.experiment.digest == kept["digest"])
    try:
        found = TRACES.trace(first.experiment, DATA)
    except InputError as error:
        if str(DATA) not in str(error):
            raise
        pytest.skip(str(error))
    for key in ("data", "partition", "batch"):
        assert found[key] == kept[key], key
    for key in ("output", "trained"):
        assert found[key] == pytest.approx(kept[key], rel=1e-9, abs=1e-9), key
