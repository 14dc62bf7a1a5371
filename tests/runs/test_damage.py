"""A run whose files were damaged: noticed, named, repaired where that is possible."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from commandline import Feddkd
from damaged import DAMAGE, finished_run, flip, halted_run, outcome, unseal
from feddkd import InputError, load
from feddkd.api.predict import predict
from feddkd.runs.damage import check
from feddkd.runs.record import find, folder_name
from feddkd.runs.recorder import Recorder
from feddkd.runs.runner import execute
from feddkd.runs.seal import SEAL, read_seal
from interrupted import OFTEN, content, experiment


class Left(NamedTuple):
    halted: Path
    finished: Path
    whole: dict[str, bytes]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Left:
    """A run that was cut short after its fourth round, and the same one finished."""
    out = tmp_path_factory.mktemp("left")
    halted_run(out / "halted")
    finished_run(out / "finished")
    return Left(out / "halted", out / "finished", content(out / "finished"))


@pytest.fixture
def halted(left: Left, tmp_path: Path) -> Path:
    """Return the folder of a copy of the halted run."""
    shutil.copytree(left.halted, tmp_path / "runs")
    return next((tmp_path / "runs").iterdir())


@pytest.fixture
def finished(left: Left, tmp_path: Path) -> Path:
    """Return the folder of a copy of the finished run."""
    shutil.copytree(left.finished, tmp_path / "runs")
    return next((tmp_path / "runs").iterdir())


@pytest.fixture
def other(finished: Path) -> Path:
    """Return the folder of a whole run beside the finished one."""
    execute([experiment(seed=1, rounds=1)], out=finished.parent, engine="serial")
    return finished.parent / folder_name(experiment(seed=1, rounds=1))


def change_line(path: Path, number: int) -> None:
    """Change a digit in a line, so that it is JSON as before."""
    lines = path.read_bytes().splitlines(keepends=True)
    old = lines[number - 1]
    at = max(old.rfind(b"%d" % digit) for digit in range(10))
    lines[number - 1] = old[:at] + (b"1" if old[at : at + 1] != b"1" else b"2") + old[at + 1 :]
    path.write_bytes(b"".join(lines))


def ended(out: Path) -> str:
    """Run the experiment; return why it could not go on, or nothing."""
    (summary,) = execute([experiment()], out=out, engine="serial", every=OFTEN)
    return str(summary.get("ended", ""))


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("state", ["halted", "finished"])
def test_damage_to_any_file_changes_no_number_in_silence(
    state: str, kind: str, left: Left, tmp_path: Path
) -> None:
    before = left.halted if state == "halted" else left.finished
    names = [path.relative_to(before) for path in before.rglob("*") if path.is_file()]
    for number, name in enumerate(sorted(names)):
        if (before / name).stat().st_size:
            out = tmp_path / str(number)
            shutil.copytree(before, out)
            DAMAGE[kind](out / name, random.Random(number))
            found = outcome(out, left.whole)
            assert found in ("same", "repaired", "refused")
            if state == "finished" and kind != "duplicate":
                # without a summary the run counts as unfinished, and is played again
                assert found == "refused" or (kind, name.name) == ("remove", "summary.json")


def test_a_whole_run_is_whole_and_every_file_is_covered(left: Left) -> None:
    (folder,) = left.finished.iterdir()
    assert check(folder) == (True, [], 6)
    seal = read_seal(folder)
    assert seal is not None
    sealed = {*seal.files, *seal.rounds[6], SEAL}
    assert sealed == {path.name for path in folder.iterdir()}


def test_rows_after_the_last_checkpoint_may_be_damaged(halted: Path, left: Left) -> None:
    change_line(halted / "rounds.jsonl", 5)
    assert not ended(halted.parent)
    assert content(halted.parent) == left.whole


def test_a_run_goes_back_to_the_checkpoint_before_the_damage_and_says_so(
    halted: Path, left: Left, caplog: pytest.LogCaptureFixture
) -> None:
    change_line(halted / "rounds.jsonl", 4)
    assert not ended(halted.parent)
    assert "goes back to round 3" in caplog.text
    assert content(halted.parent) == left.whole


def test_a_run_with_damage_before_all_checkpoints_is_refused_and_left_as_it_is(
    halted: Path,
) -> None:
    change_line(halted / "rounds.jsonl", 2)
    before = {path: path.read_bytes() for path in halted.rglob("*.json*")}
    assert "rounds.jsonl is damaged from line 2 on" in ended(halted.parent)
    assert {path: path.read_bytes() for path in halted.rglob("*.json*")} == before


@pytest.mark.parametrize(
    "name", ["manifest.json", "rounds.jsonl", "timings.jsonl", "partition.json", "summary.json"]
)
def test_readers_refuse_a_damaged_run_by_name(finished: Path, name: str) -> None:
    change_line(finished / name, 1)
    for read in (find, load):
        with pytest.raises(InputError, match=f"{finished.name} is damaged: {name}"):
            read(finished.parent)


def test_damaged_weights_are_not_loaded(finished: Path) -> None:
    flip(finished / "final.safetensors", random.Random(0))
    with pytest.raises(InputError, match=r"final\.safetensors"):
        load(finished.parent)[0].state_dict()
    with pytest.raises(InputError, match=r"final\.safetensors"):
        predict(finished, torch.zeros(1, 1, 8, 8))
    assert "final.safetensors" in ended(finished.parent)


@pytest.mark.parametrize(
    ("name", "damage"),
    [("manifest.json", "cut"), ("manifest.json", "remove"), (SEAL, "nest"), (SEAL, "occupy")],
)
@pytest.mark.parametrize("command", ["ls", "report", "resume", "check"])
def test_a_damaged_run_is_named_and_the_others_are_shown(
    command: str, name: str, damage: str, finished: Path, other: Path, feddkd: Feddkd
) -> None:
    DAMAGE[damage](finished / name, random.Random(0))
    done = feddkd(command, str(finished.parent), "--json")
    assert done.status == 1
    assert done.err.count(str(finished)) >= 1
    assert "Traceback" not in done.err
    if command == "check":
        states = {run["folder"]: run["state"] for run in json.loads(done.out)["runs"]}
        assert states == {str(finished): "damaged", str(other): "whole"}
        return
    runs = json.loads(done.out.splitlines()[-1])
    assert len(runs["methods" if command == "report" else "runs"]) == 1


def test_a_folder_with_nothing_but_a_damaged_run_is_an_error(
    finished: Path, feddkd: Feddkd
) -> None:
    (finished / "manifest.json").write_bytes(b"")
    assert feddkd("report", str(finished.parent)).status == 2


def test_an_older_run_without_a_seal_is_read_and_said_to_be_unchecked(
    finished: Path, feddkd: Feddkd
) -> None:
    unseal(finished)
    assert len(find(finished)) == 1
    done = feddkd("check", str(finished), "--json")
    assert done.status == 0
    assert json.loads(done.out)["runs"][0]["state"] == "unchecked"


def test_an_older_run_that_is_continued_is_sealed_from_there_on(halted: Path, left: Left) -> None:
    unseal(halted)
    assert not ended(halted.parent)
    assert content(halted.parent) == left.whole
    assert check(halted) == (True, [], 6)


def damage_rows(folder: Path) -> None:
    change_line(folder / "rounds.jsonl", 4)


def damage_seal(folder: Path) -> None:
    change_line(folder / SEAL, 3)


def damage_summary(folder: Path) -> None:
    change_line(folder / "summary.json", 5)


def damage_weights(folder: Path) -> None:
    flip(folder / "final.safetensors", random.Random(0))


def lose_summary(folder: Path) -> None:
    (folder / "summary.json").unlink()


@pytest.mark.parametrize(
    ("state", "damage", "repaired"),
    [
        ("halted", damage_rows, True),
        ("finished", damage_rows, False),
        ("finished", damage_seal, True),
        ("finished", damage_summary, True),
        ("finished", lose_summary, True),
        ("finished", damage_weights, False),
    ],
)
def test_check_repairs_what_can_be_repaired_and_leaves_the_rest(
    state: str,
    damage: Callable[[Path], None],
    repaired: bool,
    left: Left,
    tmp_path: Path,
    feddkd: Feddkd,
) -> None:
    out = tmp_path / "runs"
    shutil.copytree(left.halted if state == "halted" else left.finished, out)
    (folder,) = out.iterdir()
    assert feddkd("check", str(out)).status == 0
    damage(folder)
    assert feddkd("check", str(out)).status == 1
    before = (folder / "rounds.jsonl").read_bytes()
    assert feddkd("check", str(out), "--repair").status == (not repaired)
    assert feddkd("check", str(out)).status == (not repaired)
    if not repaired:
        assert (folder / "rounds.jsonl").read_bytes() == before
    if repaired:
        assert not ended(out)
        assert content(out) == left.whole


def test_a_row_whose_process_was_killed_before_it_was_written_is_no_damage(
    tmp_path: Path,
) -> None:
    recorder = Recorder(tmp_path)
    recorder.take()
    recorder.begin({"canonical": {"rounds": 3}})
    recorder.row({"round": 1, "test_accuracy": 0.5}, 0.1)
    recorder.close()
    for name in ("timings.jsonl", "rounds.jsonl"):  # the seal is written before both
        (tmp_path / name).write_bytes(b"")
        assert check(tmp_path) == (True, [], 0)
