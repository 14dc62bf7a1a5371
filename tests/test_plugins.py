"""A method in a separate package, examples/feddkd-median.

After installation it is listed, runs and passes its tests.
"""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import feddkd

EXAMPLE = Path(__file__).parent.parent / "examples" / "feddkd-median"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The package laid out as an installer would, but without network and build tools: all stands
    in its pyproject.
    """
    target = tmp_path_factory.mktemp("site")
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))
    name, version = project["project"]["name"].replace("-", "_"), project["project"]["version"]
    for module in project["tool"]["setuptools"]["py-modules"]:
        shutil.copy(EXAMPLE / f"{module}.py", target)
    facts = target / f"{name}-{version}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8"
    )
    points = project["project"]["entry-points"]
    lines = [
        line
        for group in points
        for line in (f"[{group}]", *(f"{key} = {value}" for key, value in points[group].items()))
    ]
    (facts / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert feddkd.__file__ is not None
    ours = Path(feddkd.__file__).parent.parent
    return {
        **os.environ,
        "PYTHONPATH": f"{target}{os.pathsep}{ours}",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
    }


def call(environment: dict[str, str], *arguments: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_its_method_is_listed_with_paper_and_options(environment: dict[str, str]) -> None:
    listed = {
        m["name"]: m
        for m in json.loads(call(environment, "-m", "feddkd", "methods", "--json"))["methods"]
    }
    assert listed["fedmedian"]["paper"]["number"] == "arXiv:1803.01498"
    assert listed["fedmedian"]["paper"]["venue"] == "ICML 2018"
    how_gathered = {
        "clip",
        "noise",
        "gather",
        "trim",
        "faulty",
        "radius",
    }  # its own way of gathering takes their place
    fedavg = {
        name: value
        for name, value in listed["fedavg"]["options"].items()
        if name not in how_gathered
    }
    assert listed["fedmedian"]["options"] == fedavg
    assert listed["fedmedian"]["phases"][0]["uploads"]["params"] == "every client's"


def test_a_run_can_use_it_and_dkd_goes_behind_it(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "median.toml").write_text(
        'rounds = 1\nmethod = "fedmedian(epochs=1) | dkd(steps=1)"\n', encoding="utf-8"
    )
    out = call(
        environment,
        "-m",
        "feddkd",
        "run",
        "median.toml",
        "--json",
        "--engine",
        "serial",
        cwd=tmp_path,
    )
    (run,) = json.loads(out.splitlines()[-1])["runs"]
    assert run["communications"] == 2


@pytest.mark.long
def test_its_own_tests_pass(environment: dict[str, str], tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE / "tests", tmp_path / "tests")
    call(
        environment,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-W",
        "error",
        str(tmp_path / "tests"),
        cwd=tmp_path,
    )


def test_its_methods_do_not_get_into_our_docs(environment: dict[str, str], tmp_path: Path) -> None:
    call(environment, "-m", "feddkd", "methods", "--markdown", str(tmp_path))
    assert not (tmp_path / "fedmedian.md").exists()
    assert (tmp_path / "fedavg.md").exists()
