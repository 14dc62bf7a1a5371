"""docs/one-round.md and docs/adapters-table.md: tables are those of the records, claims hold."""

import importlib.util
import json
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    path = ROOT / "tools" / "measure" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_page", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["one_round", "adapters"])
def test_the_page_is_what_the_record_says(name: str) -> None:
    made = script(name)
    record = json.loads(made.FILE.read_text(encoding="utf-8"))
    assert made.PAGE.read_text(encoding="utf-8") == made.page(record), f"run {name}.py"


def mean(line: str, key: str = "test", **where: Any) -> float:
    made = script("one_round")
    record = json.loads(made.FILE.read_text(encoding="utf-8"))
    found = [
        run[key]
        for run in record
        if run["seed"] in made.SEEDS
        and {"line": getattr(made, line), **where}.items() <= run.items()
    ]
    assert len(found) == 5
    return fmean(found)


@pytest.mark.parametrize("alpha", [0.1, 0.5])
def test_in_one_round_dkd_is_above_the_average_and_level_with_labels(alpha: float) -> None:
    assert mean("FEW", alpha=alpha) > mean("AVERAGE", alpha=alpha)
    assert mean("MANY", alpha=alpha) > mean("ALONE", "ensemble", alpha=alpha)
    assert abs(mean("MANY", alpha=alpha) - mean("LABELS", alpha=alpha)) < 0.03


def test_on_pictures_dkd_of_adapters_is_ahead_at_the_end_and_labels_are_too() -> None:
    made = script("adapters")
    runs = json.loads(made.FILE.read_text(encoding="utf-8"))["pictures"]
    last = {
        line: {run["seed"]: run["last"] for run in runs if run["line"] == line and run["seed"] < 5}
        for line in (made.AVERAGE, made.EXACT, made.SHORT, made.TAUGHT, made.LABELS)
    }
    taught, labels = last.pop(made.TAUGHT), last.pop(made.LABELS)
    assert all(taught[seed] > other[seed] for other in last.values() for seed in range(5))
    assert all(labels[seed] >= taught[seed] for seed in range(5))
