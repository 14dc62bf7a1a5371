"""A stopped run continues to the same bits."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from damaged import unseal
from feddkd import Experiment, InputError
from feddkd.runs import checkpoint
from feddkd.runs.files import put
from feddkd.runs.lock import Lock
from feddkd.runs.record import folder_name
from feddkd.runs.runner import execute
from interrupted import ENGINES, METHODS, OFTEN, content, experiment, pair
from playing import execute as execute_watched


class CutError(Exception):
    pass


def cut(after: int, experiments: list[Experiment], out: Path, **options: Any) -> None:
    """Run, and be cut off when the row of this round is written, before its checkpoint is."""

    def stop(index: int, row: dict[str, Any]) -> None:
        if row["round"] == after and index == len(experiments) - 1:
            raise CutError

    with pytest.raises(CutError):
        execute_watched(experiments, out=out, on_row=stop, **{"every": OFTEN, **options})


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", METHODS)
def test_a_run_cut_short_goes_on_to_the_same_bits(method: str, engine: str, tmp_path: Path) -> None:
    runs = [experiment(METHODS[method], seed=seed, split_seed=0) for seed in (0, 1)]
    expected = execute(runs, out=tmp_path / "whole", **ENGINES[engine])
    cut(4, runs, tmp_path / "cut", **ENGINES[engine])
    found = execute(runs, out=tmp_path / "cut", every=OFTEN, **ENGINES[engine])
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    assert [{**s, "seconds": 0} for s in found] == [{**s, "seconds": 0} for s in expected]


def test_it_goes_on_after_the_last_checkpoint_and_not_from_the_beginning(tmp_path: Path) -> None:
    e = experiment()
    seen: list[Any] = []
    cut(4, [e], tmp_path, engine="serial")
    execute_watched(
        [e], out=tmp_path, engine="serial", on_row=lambda index, row: seen.append(row["round"])
    )
    assert seen == [4, 5, 6]
    manifest = json.loads((tmp_path / folder_name(e) / "manifest.json").read_text())
    assert [turn["after"] for turn in manifest["resumed"]] == [3]


def test_strategies_are_not_chosen_anew(tmp_path: Path) -> None:
    e = experiment()
    cut(3, [e], tmp_path, engine="batched")
    (folder,) = tmp_path.iterdir()
    held = checkpoint.read(folder, e.digest, checkpoint.rounds(folder)[-1], torch.device("cpu"))
    assert held.engine["strategy"]
    execute([e], out=tmp_path, engine="batched")
    assert (
        json.loads((folder / "manifest.json").read_text())["engine"]["strategy"]
        == held.engine["strategy"]
    )


def test_what_a_run_left_that_was_killed_between_its_summary_and_its_end_is_removed(
    tmp_path: Path,
) -> None:
    e = experiment()
    cut(4, [e], tmp_path / "cut", engine="serial")
    execute([e], out=tmp_path / "whole", engine="serial")
    ended, killed = (tmp_path / name / folder_name(e) for name in ("whole", "cut"))
    shutil.copytree(ended, killed, dirs_exist_ok=True)  # the checkpoints are still there
    (killed / "lock").touch()
    assert (killed / "checkpoints").is_dir()
    execute([e], out=tmp_path / "cut", engine="serial")
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


def test_but_not_while_its_writer_is_about_to_do_so(tmp_path: Path) -> None:
    e = experiment()
    execute([e], out=tmp_path, engine="serial")
    lock = Lock(tmp_path / folder_name(e))
    lock.take()
    execute([e], out=tmp_path, engine="serial")
    assert lock.path.exists()
    lock.give_back()


def test_a_finished_run_is_left_alone_unless_it_is_asked_for_anew(tmp_path: Path) -> None:
    e = experiment()
    seen: list[Any] = []
    first = execute([e], out=tmp_path, engine="serial")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert (
        execute_watched(
            [e], out=tmp_path, engine="serial", on_row=lambda index, row: seen.append(row)
        )
        == first
    )
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert not seen
    execute_watched(
        [e], out=tmp_path, engine="serial", fresh=True, on_row=lambda index, row: seen.append(row)
    )
    assert len(seen) == 6


def test_seeds_that_stand_at_different_rounds_all_reach_the_end(tmp_path: Path) -> None:
    runs = [experiment(seed=seed) for seed in (0, 1, 2)]
    expected = execute(runs, out=tmp_path / "whole", engine="serial")
    execute(runs[:1], out=tmp_path / "cut", engine="serial")
    cut(4, runs[1:2], tmp_path / "cut", engine="serial")
    found = execute(runs, out=tmp_path / "cut", engine="serial")
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    assert [s["seed"] for s in found] == [s["seed"] for s in expected] == [0, 1, 2]


def test_seeds_cut_between_their_checkpoints_go_on_from_the_last_they_share(tmp_path: Path) -> None:
    runs = [experiment(seed=seed) for seed in (0, 1)]
    seen: list[int] = []
    execute(runs, out=tmp_path / "whole", engine="serial")
    cut(4, runs, tmp_path / "cut", engine="serial")
    newest = tmp_path / "cut" / folder_name(runs[1]) / "checkpoints" / "round-000003.json"
    newest.unlink()
    execute_watched(
        runs,
        out=tmp_path / "cut",
        engine="serial",
        on_row=lambda index, row: seen.append(row["round"]),
    )
    assert seen == [3, 3, 4, 4, 5, 5, 6, 6]
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


# --- what may have happened to the files


def cut_run(tmp_path: Path) -> tuple[Experiment, Path]:
    e = experiment()
    cut(4, [e], tmp_path / "cut", engine="serial")
    return e, tmp_path / "cut" / folder_name(e)


@pytest.mark.parametrize("name", ["rounds.jsonl", "timings.jsonl"])
def test_a_torn_last_line_is_cut_and_redone(tmp_path: Path, name: str) -> None:
    e, folder = cut_run(tmp_path)
    with (folder / name).open("ab") as file:
        file.write(b'{"round": 5, "test_acc')
    execute([e], out=tmp_path / "cut", engine="serial")
    execute([e], out=tmp_path / "whole", engine="serial")
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
@pytest.mark.parametrize(
    "damage", [lambda text: text[:-9], lambda text: text[:50] + b"?" + text[51:], lambda text: b""]
)
def test_a_damaged_checkpoint_is_left_aside_and_the_one_before_it_taken(
    tmp_path: Path, suffix: str, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    e, folder = cut_run(tmp_path)
    seen: list[int] = []
    path = (folder / "checkpoints" / "round-000003").with_suffix(suffix)
    path.write_bytes(damage(path.read_bytes()))
    execute_watched(
        [e],
        out=tmp_path / "cut",
        engine="serial",
        on_row=lambda index, row: seen.append(row["round"]),
    )
    assert seen == [3, 4, 5, 6]
    assert "round-000003" in caplog.text
    assert "damaged" in caplog.text
    execute([e], out=tmp_path / "whole", engine="serial")
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("digest", "0" * 64, "another experiment"), ("format", 99, "newer feddkd")],
)
def test_a_checkpoint_of_another_experiment_or_format_is_refused(
    tmp_path: Path, key: str, value: Any, words: str
) -> None:
    e, folder = cut_run(tmp_path)
    path = folder / "checkpoints" / "round-000003.json"
    path.write_bytes(checkpoint.signed({**json.loads(path.read_text())["page"], key: value}))
    with pytest.raises(InputError, match=words):
        execute([e], out=tmp_path / "cut", engine="serial")


def test_a_run_whose_data_have_changed_is_refused(tmp_path: Path) -> None:
    e, folder = cut_run(tmp_path)
    unseal(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(
        json.dumps({**manifest, "data": {**manifest["data"], "digest": "other"}})
    )
    with pytest.raises(InputError, match="its data was"):
        execute([e], out=tmp_path / "cut", engine="serial")


def test_only_the_last_two_are_kept_and_none_once_it_is_finished(tmp_path: Path) -> None:
    e, folder = cut_run(tmp_path)
    assert checkpoint.rounds(folder) == [2, 3]
    assert len(list((folder / "checkpoints").iterdir())) == 4
    execute([e], out=tmp_path / "cut", engine="serial")
    assert not (folder / "checkpoints").exists()


def test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = experiment()

    def full(path: Path, data: bytes) -> None:
        if path.name == "round-000004.safetensors":
            path.with_suffix(".safetensors.part").write_bytes(data[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put(path, data)

    monkeypatch.setattr(checkpoint, "put", full)
    with pytest.raises(OSError, match="No space left"):
        execute([e], out=tmp_path / "cut", engine="serial", every=OFTEN)
    monkeypatch.undo()
    assert checkpoint.rounds(tmp_path / "cut" / folder_name(e)) == [2, 3]
    execute([e], out=tmp_path / "cut", engine="serial", every=OFTEN)
    execute([e], out=tmp_path / "whole", engine="serial")
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


# --- who may write


def test_a_second_process_on_the_same_run_is_refused_with_the_name_of_the_first(
    tmp_path: Path,
) -> None:
    e = experiment()

    def again(index: int, row: dict[str, Any]) -> None:
        with pytest.raises(InputError, match=f"is being written by process {os.getpid()} on"):
            execute([e], out=tmp_path, engine="serial")
        raise CutError

    with pytest.raises(CutError):
        execute_watched([e], out=tmp_path, engine="serial", on_row=again)
    execute([e], out=tmp_path, engine="serial")


def test_a_stale_lock_keeps_nobody_out(tmp_path: Path) -> None:
    folder = tmp_path / folder_name(experiment())
    folder.mkdir()
    (folder / "lock").write_text("process 1 on nowhere\n")
    execute([experiment()], out=tmp_path, engine="serial")
    assert not (folder / "lock").exists()


def test_a_lock_can_be_taken_again_once_it_is_given_back(tmp_path: Path) -> None:
    first, second = Lock(tmp_path), Lock(tmp_path)
    first.take()
    with pytest.raises(InputError):
        second.take()
    first.give_back()
    second.take()
    second.give_back()


# --- signals

SUPPORT = Path(__file__).parents[1] / "support"  # modules that the scripts import
SCRIPT = """
import sys, time
from pathlib import Path
from feddkd.runs.signals import Halted
from feddkd.runs.session import Every
from playing import execute as execute_watched
from interrupted import pair
def told(index, row):
    print(row["round"], flush=True)
    time.sleep(0.1)
try:
    how = {"engine": "serial", "every": Every(rounds=1000)}
    execute_watched(pair(), out=Path(sys.argv[1]), on_row=told, **how)
except Halted as halted:
    print(halted, flush=True)
    sys.exit(halted.status)
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the script's run without a stop."""
    out = tmp_path_factory.mktemp("whole")
    execute(pair(), out=out, engine="serial", every=OFTEN)
    return out


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.long)],
)
def test_a_signal_lets_the_round_end_and_the_next_start_goes_on(
    number: signal.Signals, status: int, tmp_path: Path, whole: Path
) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "cut")]
    with subprocess.Popen(
        command,
        cwd=SUPPORT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        while "4" not in process.stdout.readline():
            pass
        process.send_signal(number)
        text, _ = process.communicate(timeout=120)
    assert process.returncode == status
    assert "stopped after round" in text
    seen: list[int] = []
    execute_watched(
        pair(),
        out=tmp_path / "cut",
        engine="serial",
        every=OFTEN,
        on_row=lambda index, row: seen.append(row["round"]),
    )
    assert 4 not in seen
    assert content(tmp_path / "cut") == content(whole)


@pytest.mark.long
def test_runs_killed_at_any_moment_end_in_the_same_bits() -> None:
    script = SUPPORT.parents[1] / "tools" / "sigkills.py"
    done = subprocess.run(
        [sys.executable, str(script), "10"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("10 SIGKILLs")


# --- what has changed around it


def resumed(folder: Path) -> list[dict[str, Any]]:
    manifest = json.loads((folder / "manifest.json").read_text())
    return [turn.get("differs", {}) for turn in manifest["resumed"]]


def test_a_run_that_goes_on_as_it_was_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    e, folder = cut_run(tmp_path)
    execute([e], out=tmp_path / "cut", engine="serial")
    assert resumed(folder) == [{}]
    assert not [line for line in caplog.records if line.levelname == "WARNING"]


def test_what_may_change_a_bit_is_said_in_one_line_and_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    e, folder = cut_run(tmp_path)
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    monkeypatch.setattr(torch, "__version__", "2.0.0")
    monkeypatch.setattr("feddkd.runs.circumstances.__version__", "99")
    options = {"strategy": "vmap"}
    execute([e], out=tmp_path / "cut", engine="batched", options=options)
    (differs,) = resumed(folder)
    assert set(differs) == {"feddkd", "torch", "threads", "engine", "strategy"}
    assert differs["threads"] == [threads, threads + 1]
    assert differs["engine"] == ["serial", "batched"]
    said = [line.getMessage() for line in caplog.records if "continues with" in line.getMessage()]
    assert len(said) == 1
    assert all(key in said[0] for key in differs)
