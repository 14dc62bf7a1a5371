"""Read, resume, report and run what an older version wrote: the same digests, the same rows.

The files are in fixtures/version-0.1; its README says what they are. They may not be changed.
"""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import feddkd as package
from commandline import Done, Feddkd
from feddkd import METHODS
from old_files import (
    KEPT,
    canonical_methods,
    commands,
    digests_of,
    find_runs,
    key_paths,
    lines,
    machine,
    options_of,
    read_json,
    simulated,
    varied_methods,
)

# A plug-in or an app may import from where a name used to be. A warning about that is no failure.
pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning")

ENGINES: dict[str, str] = read_json(KEPT / "engines.json")
DIGESTS: dict[str, Any] = read_json(KEPT / "digests.json")
SURFACE: dict[str, Any] = read_json(KEPT / "surface.json")
STOPPED = sorted(path.name for path in (KEPT / "stopped").iterdir())
TOLERANCE = {"float64": 1e-12, "float32": 1e-4}  # relative; another processor may round otherwise
SAME_MACHINE = read_json(KEPT / "machine.json") == machine()
# Keys of sentences, times and places
WORDED = ("selection", "protocol", "ended", "started", "text", "summary", "folder")


@pytest.fixture
def old(feddkd: Feddkd) -> Feddkd:
    """Return the command line, in a folder that holds a copy of all kept files."""
    shutil.copytree(KEPT, Path.cwd(), dirs_exist_ok=True)
    return feddkd


def done(old: Feddkd, line: str, *words: str) -> Done:
    """Call a command that must succeed."""
    found = old(*line.split(), *words)
    assert found.status == 0, found.err
    return found


def output(old: Feddkd, line: str) -> Any:
    """Return the JSON object that a command ends with."""
    return json.loads(done(old, line).out.splitlines()[-1])


def check_same(kept: Any, found: Any, tolerance: float = 1e-12) -> None:
    """Check that all that was kept is there with the same value; there may be more keys."""
    if isinstance(kept, dict):
        for key in kept.keys() - set(WORDED):
            check_same(kept[key], found[key], tolerance)
    elif isinstance(kept, list):
        assert len(kept) == len(found)
        for one, other in zip(kept, found, strict=True):
            check_same(one, other, tolerance)
    elif isinstance(kept, float):
        assert found == pytest.approx(kept, rel=tolerance, abs=tolerance)
    else:
        assert found == kept


def check_same_run(kept: Path, found: Path, dtype: str) -> None:
    """Check that two runs have the same digests, rows and tensors, up to rounding."""
    before, after = (read_json(run / "manifest.json") for run in (kept, found))
    for key in ("experiment", "canonical", "digest", "family", "data", "partition", "parameters"):
        assert after[key] == before[key], key
    check_same(lines(kept / "rounds.jsonl"), lines(found / "rounds.jsonl"), TOLERANCE[dtype])
    assert read_json(found / "partition.json") == read_json(kept / "partition.json")
    if (kept / "summary.json").exists():
        check_same_end(kept, found, dtype)


def check_same_end(kept: Path, found: Path, dtype: str) -> None:
    """Check that two finished runs have the same summary, confusion matrix and tensors."""
    summary = read_json(kept / "summary.json")
    del summary["seconds"]
    check_same(summary, read_json(found / "summary.json"), TOLERANCE[dtype])
    if dtype == "float64":
        assert read_json(found / "confusion.json") == read_json(kept / "confusion.json")
    before, after = (load_file(run / "final.safetensors") for run in (kept, found))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        difference = (tensor.double() - after[name].double()).abs().max().item()
        assert difference <= 100 * TOLERANCE[dtype], name


def check_same_bytes(kept: Path, found: Path) -> None:
    """Check that two runs have the same bits, if this is the machine of the first one."""
    if SAME_MACHINE:
        for name in ("rounds.jsonl", "partition.json", "confusion.json", "final.safetensors"):
            if (kept / name).exists():
                assert (found / name).read_bytes() == (kept / name).read_bytes(), name


def check_runs(kept: Path, found: Path, dtype: str) -> None:
    """Check that two folders hold the same runs under the same names."""
    assert [run.name for run in find_runs(found)] == [run.name for run in find_runs(kept)] != []
    for before, after in zip(find_runs(kept), find_runs(found), strict=True):
        check_same_run(before, after, dtype)
        check_same_bytes(before, after)


def dtype_of(name: str) -> str:
    """Return the type of numbers that is in the name of an experiment's file."""
    return name.rpartition("-")[2]


# Runs


@pytest.mark.parametrize("name", ENGINES)
def test_an_old_experiment_gives_the_old_rows(old: Feddkd, name: str) -> None:
    ended = name.startswith("ended")
    found = old("run", f"experiments/{name}.toml", *ENGINES[name].split(), "--out", "new")
    assert found.status == int(ended), found.err
    check_runs(Path("finished") / name, Path("new"), dtype_of(name))


@pytest.mark.parametrize("name", STOPPED)
def test_an_old_run_that_was_stopped_goes_on_to_the_old_end(old: Feddkd, name: str) -> None:
    before = find_runs(Path("stopped") / name)
    assert all(0 < len(lines(run / "rounds.jsonl")) < 6 for run in before)
    assert all((run / "checkpoints").is_dir() for run in before)
    done(old, f"resume stopped/{name} {ENGINES[name]}")
    check_runs(Path("finished") / name, Path("stopped") / name, dtype_of(name))
    for run in before:
        manifest = read_json(run / "manifest.json")
        assert manifest["resumed"][0]["after"] in (1, 2, 3, 4, 5)
        assert not (run / "checkpoints").exists()


def test_the_command_that_began_an_old_run_ends_it(old: Feddkd) -> None:
    name = "scaffold-float64"
    done(old, f"run experiments/{name}.toml {ENGINES[name]} --out stopped/{name}")
    check_runs(Path("finished") / name, Path("stopped") / name, "float64")
    (run,) = find_runs(Path("stopped") / name)
    assert "resumed" in read_json(run / "manifest.json")


def test_a_finished_old_run_is_left_alone(old: Feddkd) -> None:
    files = sorted(path for path in Path("finished").rglob("*") if path.is_file())
    before = {path: path.read_bytes() for path in files if "ended" not in str(path)}
    name = "feddkd-float32"
    done(old, f"run experiments/{name}.toml {ENGINES[name]} --out finished/{name}")
    assert {path: path.read_bytes() for path in before} == before


def test_a_run_from_python_gives_the_old_rows() -> None:
    check_same(read_json(KEPT / "simulated.json"), simulated())


# Tables of runs


@pytest.mark.parametrize("command", ["ls", "report", "compare"])
def test_old_runs_are_read_into_the_old_tables(old: Feddkd, command: str) -> None:
    (line,) = (line for line in SURFACE["outputs"] if line.startswith(command))
    check_same(read_json(KEPT / f"output-{command}.json"), output(old, line))


def test_old_runs_make_a_page_and_a_figure(old: Feddkd) -> None:
    done(old, "report finished --out page.html")
    few = "finished/feddkd-float32 finished/fedavg-float64"
    done(old, f"report {few} --figure curves.svg")
    page = Path("page.html").read_text(encoding="utf-8")
    for run in find_runs(Path("finished/feddkd-float32")):
        assert run.name.rpartition("-")[2] in page
    assert Path("curves.svg").stat().st_size > 0


def test_old_runs_in_the_middle_are_listed_as_halted(old: Feddkd) -> None:
    entries = output(old, "ls stopped --json")["runs"]
    assert len(entries) == len(find_runs(KEPT / "stopped"))
    assert {entry["state"] for entry in entries} == {"halted"}


def test_old_runs_are_shown_by_watch(old: Feddkd) -> None:
    start = "from feddkd.cli import main; main()"
    words = ["watch", "finished/feddkd-float32", "--port", "0"]
    command = [sys.executable, "-c", start, *words]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[-1]
            with urllib.request.urlopen(address, timeout=60) as answer:
                assert "FedDKD" in answer.read().decode()
        finally:
            process.kill()


# Digests


@pytest.fixture
def in_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Go to the folder of the kept files, which the experiments name their files in."""
    monkeypatch.chdir(KEPT)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.usefixtures("in_kept")
def test_an_old_manifest_is_still_an_experiment_of_the_same_digest(name: str) -> None:
    for run in find_runs(Path("finished") / name):
        manifest = read_json(run / "manifest.json")
        digests = {"digest": manifest["digest"], "family": manifest["family"]}
        assert digests_of(manifest["experiment"]) == digests


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.usefixtures("in_kept")
def test_an_old_toml_file_has_the_same_digests(name: str) -> None:
    table = tomllib.loads(Path(f"experiments/{name}.toml").read_text(encoding="utf-8"))
    seeds = table.pop("sweep", {"seed": [table.get("seed", 0)]})["seed"]
    found = [digests_of({**table, "seed": seed})["digest"] for seed in seeds]
    assert sorted(found) == DIGESTS["runs"][name]


@pytest.mark.usefixtures("in_kept")
def test_every_key_of_an_experiment_gives_the_old_digest() -> None:
    for kept in DIGESTS["experiments"]:
        assert {"table": kept["table"], **digests_of(kept["table"])} == kept


def test_every_method_has_its_old_canonical_text() -> None:
    check_same(DIGESTS["methods"], canonical_methods())


def test_every_option_of_a_method_changes_its_canonical_text_as_before() -> None:
    found = varied_methods()
    check_same(DIGESTS["varied methods"], found)


def test_data_have_their_old_digests(old: Feddkd) -> None:
    told = done(old, "data check", *DIGESTS["data"]).out.splitlines()
    for line, (text, digest) in zip(told, DIGESTS["data"].items(), strict=True):
        assert line.startswith(f"{text}: ")
        assert digest in line


@pytest.mark.parametrize("text", DIGESTS["partitions"])
def test_a_partition_is_drawn_as_before(old: Feddkd, text: str) -> None:
    Path("one.toml").write_text('method = "fedavg()"\nclients = 3\nseed = 2\n', encoding="utf-8")
    done(old, "data show one.toml --save one.npz", "--set", f"partition={text}")
    with np.load("one.npz") as arrays:
        assert str(arrays["digest"]) == DIGESTS["partitions"][text]


# Packed data, plug-ins, Flower


def test_old_packed_data_give_the_old_rows(old: Feddkd) -> None:
    name = "fedavg-float64"
    done(old, f"run experiments/{name}.toml {ENGINES[name]} --data packed --out new")
    check_runs(Path("finished") / name, Path("new"), "float64")


def test_data_are_packed_as_before(old: Feddkd) -> None:
    done(old, "data pack experiments/fedavg-float64.toml --out again")
    (before,), (after,) = (list(Path(folder).glob("*.json")) for folder in ("packed", "again"))
    assert after.name == before.name
    for page in (kept := read_json(before), found := read_json(after)):
        for piece in page["pieces"]:
            del piece["sha256"]  # of a compressed file, which another zlib writes otherwise
    check_same(kept, found)


def environment() -> dict[str, str]:
    """Return the environment of a process that finds feddkd and the kept plug-in."""
    assert package.__file__ is not None
    paths = [str(Path(package.__file__).parent.parent), str(Path("plugin").resolve())]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


PLUGIN = """
import sys
from feddkd import cli
for line in sys.argv[1].splitlines():
    sys.argv = ["feddkd", *line.split()]
    try:
        cli.main()
    except SystemExit as end:
        assert not end.code, line
import feddkd.testing
feddkd.testing.rehearse("old_median(epochs=1, batch_size=8) | dkd(steps=1, batch_size=8)", rounds=1)
assert feddkd.testing.check_method
"""


def test_an_old_plug_in_runs_and_resumes_through_its_old_imports(old: Feddkd) -> None:
    names = ("plugin-median", "plugin-fedbn")
    words = [f"run plugin/{name}.toml --engine serial --out new/{name}" for name in names]
    words += [
        "resume plugin/stopped --engine serial",
        "report plugin/finished",
        "methods old_median old_proximal",
    ]
    command = [sys.executable, "-c", PLUGIN, "\n".join(words)]
    found = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    for name in names:
        check_runs(Path("plugin/finished") / name, Path("new") / name, "float64")
    check_runs(Path("plugin/finished/plugin-fedbn"), Path("plugin/stopped/plugin-fedbn"), "float64")


def test_an_old_flower_app_gives_the_old_rows(old: Feddkd) -> None:
    pytest.importorskip("flwr")
    from old_flower import play

    play(Path("flower"), {"out": "new"})
    check_runs(Path("flower/finished"), Path("new"), "float64")


def test_an_old_flower_run_that_was_stopped_goes_on_to_the_old_end(old: Feddkd) -> None:
    pytest.importorskip("flwr")
    from old_flower import play

    (run,) = find_runs(Path("flower/stopped"))
    assert 0 < len(lines(run / "rounds.jsonl")) < 3
    play(Path("flower"), {"out": "flower/stopped"})
    check_runs(Path("flower/finished"), Path("flower/stopped"), "float64")


def test_flower_commands_write_the_old_files(old: Feddkd) -> None:
    pytest.importorskip("flwr")
    done(old, "flower init new/app")
    done(old, "flower certificate new/server fed.example.org")
    done(old, "flower key new/keys/node")
    for part in ("app", "server", "keys"):
        kept = {path.name for path in Path("flower", part).iterdir()}
        private = {"server": {"server.key", "ca.key"}, "keys": {"node"}}.get(part, set())
        assert {path.name for path in Path("new", part).iterdir()} == kept | private


# The command line and the public names


@pytest.mark.parametrize("command", SURFACE["commands"])
def test_a_command_has_its_old_options(command: str) -> None:
    found = commands()
    assert command in found
    for option, facts in SURFACE["commands"][command].items():
        now = found[command].get(option)
        # an argument that is no longer required, or that may be repeated, takes what it took
        assert now in (facts, {**facts, "required": False}, {**facts, "many": True}), option


@pytest.mark.parametrize("line", SURFACE["outputs"])
def test_the_json_of_a_command_has_its_old_keys(old: Feddkd, line: str) -> None:
    found = key_paths(output(old, line))
    assert set(SURFACE["outputs"][line]) - found == set()


def test_every_method_has_its_old_options_and_defaults() -> None:
    assert SURFACE["methods"].keys() <= set(METHODS)
    for name, options in SURFACE["methods"].items():
        found = options_of(name)
        assert options.items() <= found.items(), name


def test_the_old_public_names_are_there() -> None:
    assert [name for name in SURFACE["names"] if not hasattr(package, name)] == []
