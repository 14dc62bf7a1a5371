"""Commands that only read records or lists do not load torch, and say the same as if they did."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feddkd as package
from commandline import TINY, Feddkd
from feddkd import Experiment
from feddkd.cli.app import COMMANDS
from feddkd.method_docs import metadata, snapshot
from feddkd.reports.compare import differences
from feddkd.reports.statistics import paired
from feddkd.reports.text_differences import UnclearError, text_differences
from feddkd.runs.description import manifest_of

LIGHT = """
import sys
from feddkd.cli import main
sys.argv = ["feddkd", *sys.argv[1:]]
try:
    main()
finally:
    heavy = {"torch", "sklearn", "matplotlib", "scipy.stats", "flwr"} & set(sys.modules)
    print("heavy:", *sorted(heavy), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("records")
    (place / "tiny.toml").write_text(TINY)
    plain: dict[str, Any] = {"method": "fedavg(epochs=1)", "clients": 3, "rounds": 1}
    for name, changes in {"a": {}, "b": {"method": "fedprox(mu=0.1)"}}.items():
        experiments = [Experiment(**{**plain, **changes, "seed": seed}) for seed in (0, 1, 2)]
        package.run(experiments, place / "runs" / name, engine="serial")
    return place


@pytest.mark.parametrize(
    "line",
    [
        "--help", "--version", "nonsense", "report runs", "report runs --json", "ls runs",
        "ls runs --where seed=1 --sort best", "compare runs/a runs/b", "methods", "methods dkd",
        "methods --json", "report --help", "ls --help", "methods --help", "compare --help",
    ],
)  # fmt: skip
def test_light_commands_do_not_load_torch(folder: Path, line: str) -> None:
    command = [sys.executable, "-c", LIGHT, *line.split()]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].strip() == "heavy:", done.stderr
    assert done.returncode == (2 if line == "nonsense" else 0)


def test_the_package_alone_does_not_load_torch() -> None:
    code = (
        "import sys, feddkd; assert 'torch' not in sys.modules;"
        " assert {'simulate', 'run', 'load', 'dkd'} <= set(dir(feddkd));"
        " from feddkd import *; assert dkd and simulate; feddkd.rounds.availability.listed([])"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", package.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(package, name) is not None


def test_what_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'nonsense'"):
        package.nonsense  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help_page(feddkd: Feddkd, name: str) -> None:
    assert COMMANDS[name].help.split()[0] in feddkd("--help").out
    done = feddkd(name, "--help")
    assert (done.status, f"feddkd {name}" in done.out) == (0, True)


def test_the_file_of_methods_is_up_to_date() -> None:
    own = [entry for entry in metadata.entries() if entry.own]
    assert snapshot.read() == own, "make methods-docs"
    assert [entry.keeps for entry in snapshot.read()] == [entry.keeps for entry in own]


def test_the_file_of_methods_is_not_used_with_plug_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert snapshot.is_complete() or metadata.entries()
    monkeypatch.setattr(snapshot, "entry_points", lambda group: [object()])
    assert not snapshot.is_complete()


CHANGES: list[dict[str, Any]] = [
    {},
    {"seed": 4},
    {"method": "fedavg( epochs=1,lr=.3) |dkd"},
    {"method": "fedprox(mu=0.5) | dkd(steps=3)"},
    {"method": "fedavg() | dkd() | private(names='head.*')"},
    {"method": "fedavg(optimiser='adam', noise=0.1, clip=1.0)"},
    {"partition": "iid()", "clients": 3, "rounds": 2, "cohort": 2},
    {"partition": "classes(per_client=2)"},
    {"model": "mlp(hidden='32')"},
    {"model": "small_cnn"},
    {"data": "generated_digits"},
    {"transform": "normalise(mean=0.5, std=0.5)"},
    {"transform": "pad(pixels=2) | normalise(mean=0.5, std=0.25)"},
    {"availability": "random(drop=0.2)", "min_clients": 2, "shuffle": False},
    {"split_seed": 3, "validation": 0.2, "dtype": "float64"},
]


@pytest.mark.parametrize(("a", "b"), [*itertools.combinations(range(len(CHANGES)), 2)])
def test_texts_tell_the_differences_of_experiments(a: int, b: int) -> None:
    first, second = (Experiment(**{"method": "fedavg()", **CHANGES[at]}) for at in (a, b))
    expected = differences(first, second)
    manifests = [json.loads(json.dumps(manifest_of(one))) for one in (first, second)]
    try:
        assert text_differences(*manifests) == expected
    except UnclearError:  # the command then asks the experiments
        assert {"data", "partition", "model", "transform"} & expected.keys()


@pytest.mark.parametrize("n", [3, 4, 5, 9])
def test_the_t_test_is_that_of_scipy(n: int) -> None:
    from scipy.stats import ttest_1samp

    draws = np.random.default_rng(n)
    for _ in range(20):
        values = dict(enumerate(draws.normal(0.3, 1.0, n).tolist()))
        test = paired(values, dict.fromkeys(values, 0.0))
        assert test is not None
        expected = float(ttest_1samp(list(values.values()), 0.0).pvalue)
        assert test.t_p == pytest.approx(expected, rel=1e-13)
