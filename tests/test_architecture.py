"""The house rules that a reader should be able to rely on."""

import ast
import re
from pathlib import Path

import pytest

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "feddkd"

# Imports go one way: a room may use those on the lines above it, and its neighbours on its own line.
FLOORS = [
    ["errors", "version", "halt", "grids", "heterogeneity"],
    ["values", "grammar", "spelling", "keys", "params", "lock", "schedules"],
    ["data", "models"],
    ["method"],
    ["objectives", "optimisers", "matching"],
    ["methods"],
    ["catalogue"],
    ["manual"],
    ["engines"],
    ["evaluate", "costs", "diagnostics", "privacy", "availability"],
    ["exchanges"],
    ["rounds", "checkpoint"],
    ["summary", "significance", "simulation", "testing"],
    ["experiment"],
    ["record"],
    ["prepare", "report", "bands", "bench", "papers"],
    ["session", "forecast", "loggers"],
    ["execute"],
    ["flower"],
    ["figure", "page", "plates", "differences"],
    ["__init__"],
    ["commands"],
    ["cli"],
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(SOURCE.rglob("*.py"))
FLOWER = [
    *(SOURCE / "engines" / f"{name}.py" for name in ("flower", "letters", "secure", "shares")),
    *(SOURCE / "flower").glob("*.py"),
]


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(f"{node.module}" if node.module != "feddkd" else f"feddkd.{node.names[0].name}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_one_way(path: Path) -> None:
    assert room_of(path) in FLOOR, "a new room: give it a floor"
    for name in imported(path):
        if name.startswith("feddkd."):
            other = name.split(".")[1]
            assert FLOOR[other] <= FLOOR[room_of(path)], f"{path.name} imports {name}, which lies above it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_flower_and_the_accountant_stay_in_their_rooms_and_torchvision_out(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported(path)}
    assert "torchvision" not in roots
    assert "flwr" not in roots or path in FLOWER
    assert "dp_accounting" not in roots or path == SOURCE / "privacy.py"


def test_no_room_is_without_a_name_of_its_own() -> None:
    names = {part.removesuffix(".py") for path in FILES for part in path.relative_to(SOURCE).parts}
    assert not names & {"utils", "util", "common", "helpers", "base", "core", "misc"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_library_prints_nothing(path: Path) -> None:
    if room_of(path) not in ("cli", "commands"):
        assert not re.search(r"\bprint\(", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", sorted((SOURCE / "methods").glob("[a-z]*.py")), ids=lambda path: path.name)
def test_a_methods_file_says_who_published_it(path: Path) -> None:
    if path.stem not in ("local", "registry"):
        assert re.search(
            r"arXiv:\d{4}\.\d{5}|doi:10\.\d{4,}/", ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        )


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_every_mutant_still_applies_and_is_listed_in_the_docs(mutant: Mutant) -> None:
    assert (SOURCE / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1
    assert mutant.what in (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
