"""The rules of the code that a reader can rely on."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "feddkd"

# Imports go one way: a package may import those on the lines above it, and nothing from its own
# line but itself.
LEVELS = [
    [
        "errors",
        "gradient",
        "version",
        "randomness",
        "tensors",
        "trees",
        "old_paths",
        "process_lock",
    ],
    ["spec"],
    ["tasks"],
    ["data", "models"],
    ["method"],
    ["engines", "methods"],
    ["method_docs", "rounds"],
    ["experiment", "simulation"],
    ["bench", "runs", "testing"],
    ["api", "flower", "reports"],
    ["__init__", "extend", "papers"],
    ["cli"],
]
# of methods/
INFRASTRUCTURE = (
    "arrivals", "local", "registry", "aggregation", "defences", "losses", "personal", "teachers",
    "unit_matching", "virtual_samples",
)  # fmt: skip
LEVEL = {package: level for level, packages in enumerate(LEVELS) for package in packages}
FILES = sorted(SOURCE.rglob("*.py"))
FLOWER = [*(SOURCE / "flower").rglob("*.py")]  # which alone may import flwr


def package_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    return "cli" if first == "__main__" else first


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(
                f"{node.module}" if node.module != "feddkd" else f"feddkd.{node.names[0].name}"
            )
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_one_way(path: Path) -> None:
    own = package_of(path)
    for name in imported(path):
        other = name.split(".")[1] if name.startswith("feddkd.") else own
        assert other == own or LEVEL[other] < LEVEL[own], (
            f"{path.name} imports {name}, which is not below it"
        )


def test_few_modules_lie_loose_at_the_top() -> None:
    assert len([path for path in SOURCE.glob("*.py") if path.stem.strip("_") == path.stem]) <= 8
    assert len(LEVELS) <= 12


def test_no_two_classes_share_a_name() -> None:
    places: dict[str, set[Path]] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, set()).add(path)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_flower_and_the_accountant_have_one_place_each_and_torchvision_none(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported(path)}
    assert "torchvision" not in roots
    assert "flwr" not in roots or path in FLOWER
    assert "dp_accounting" not in roots or path == SOURCE / "rounds" / "privacy.py"


PUBLIC_FLOWER = {"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.simulation"}


@pytest.mark.parametrize("path", FLOWER, ids=lambda path: str(path.relative_to(SOURCE)))
def test_flowers_private_names_have_one_place(path: Path) -> None:
    private = {name for name in imported(path) if name.split(".")[0] == "flwr"} - PUBLIC_FLOWER
    assert not private or path == SOURCE / "flower" / "flwr_internals.py"


WITHOUT_FLOWER = """
import importlib, sys
sys.modules["flwr"] = None
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if "flwr" in error.name:
            raise
from feddkd.cli import main
sys.argv = ["feddkd", "run", "tiny.toml"]
try:
    main()
except SystemExit as end:
    assert not end.code
sys.argv = ["feddkd", "flower", "up", "tiny.toml"]
main()
"""


def test_without_flower_there_is_everything_but_flower(tmp_path: Path) -> None:
    """Every module can be imported and every command but `flower` works; that one says what it
    needs.
    """
    modules = [
        ".".join(("feddkd", *path.relative_to(SOURCE).with_suffix("").parts))
        for path in FILES
        if path not in FLOWER
    ]
    (tmp_path / "tiny.toml").write_text("method = 'fedavg(epochs=1)'\nclients = 2\nrounds = 1\n")
    command = [
        sys.executable,
        "-c",
        WITHOUT_FLOWER,
        *(name for name in modules if not name.endswith("__main__")),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stderr.splitlines()[-1].endswith(
        "this needs Flower: pip install 'feddkd[flower]'"
    ), done.stderr
    assert done.returncode == 2


def test_every_module_has_a_name_of_its_own() -> None:
    names = {part.removesuffix(".py") for path in FILES for part in path.relative_to(SOURCE).parts}
    assert not names & {"utils", "util", "common", "helpers", "base", "core", "misc"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_library_prints_nothing(path: Path) -> None:
    if package_of(path) != "cli":
        assert not re.search(r"\bprint\(", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "path", sorted((SOURCE / "methods").glob("[a-z]*.py")), ids=lambda path: path.name
)
def test_a_methods_file_says_who_published_it(path: Path) -> None:
    if path.stem not in INFRASTRUCTURE:
        assert re.search(
            r"arXiv:\d{4}\.\d{5}|doi:10\.\d{4,}/",
            ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "",
        )


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_every_mutant_still_applies_and_is_listed_in_the_docs(mutant: Mutant) -> None:
    assert (SOURCE / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1
    assert mutant.what in (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
