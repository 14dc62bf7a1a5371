"""Compare the pages about Flower with their records: costs, and a federation with faults."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("flwr")

from feddkd.papers.drawing import drawn_digest

ROOT = Path(__file__).parents[2]
PART = {
    "nodes": 2,
    "steps": 10,
    "exchanges": [0.5] * 18 + [0.7, 1.5],
    "rounds": [6.0, 7.0, 8.0],
    "up": 9.1,
    "down": 1.2,
}
MADE_UP: dict[str, dict[str, Any]] = {
    "flower": {
        "command": "python x.py",
        "flwr": "1.41.0",
        "cores": 2,
        "load": [0.1, 0.9],
        "federations": [PART],
        "plain": [5.0, 6.0, 9.0],
        "wire": {**PART, "wire": [104_000, 101_000], "counted": [100_000, 100_000]},
    },
    "federation": {
        "command": "python y.py",
        "flwr": "1.41.0",
        "nodes": 4,
        "toml": ["rounds = 2"],
        "federation": [0.5, 0.75],
        "blows": [[3, 1, "train.distil", 3, False], [1, 2, "train.local", 1, True]],
        "absences": [[1, 3, "distil", 3, "drop"]],
        "gone": [1, 2],
        "left": [3, 2],
        "simulator": [0.5, 0.7501],
        "largest": 0.0001,
        "cores": 2,
        "load": 0.4,
        "seconds": [100.4, 5.2],
    },
}
SAID = {
    "flower": ["| 2 | 0.5 | 0.7 | 20 | 7.0 | 9.1 | 1.2 |", "+4.0%", "+1.0%", "6.00 s"],
    "federation": ["75.00%", "75.01%", "0.0100", "100 s"],
}


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"{name}_page", ROOT / "tools" / "measure" / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", MADE_UP)
def test_a_page_has_the_numbers_of_its_record(name: str, tmp_path: Path) -> None:
    found, kept = script(name), MADE_UP[name]
    written = " ".join(found.page(kept).split())
    assert [text for text in SAID[name] if text not in written] == []
    if name == "federation":
        found.draw(kept, tmp_path / "picture.png")
        assert drawn_digest(tmp_path / "picture.png") == found.digest(kept)


@pytest.mark.parametrize(
    ("name", "record"),
    [("flower", "flower-table"), ("federation", "federation"), ("tasks", "tasks-table")],
)
def test_the_page_in_the_docs_is_what_its_record_says(name: str, record: str) -> None:
    path, found = ROOT / "docs" / f"{record}.json", script(name)
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert path.with_suffix(".md").read_text(encoding="utf-8") == found.page(kept)
    if name == "federation":
        assert drawn_digest(ROOT / "docs" / "pictures" / "federation.png") == found.digest(kept)
