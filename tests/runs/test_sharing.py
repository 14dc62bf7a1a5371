"""Several processes on one sweep: they share its runs, and each run is what it is alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from feddkd import Experiment, InputError
from feddkd.runs.lock import Lock
from feddkd.runs.record import folder_name, survey
from feddkd.runs.runner import How, play_all
from feddkd.runs.session import RunBegun, RunEnded
from interrupted import content, experiment

SERIAL = How("serial")


def sweep() -> list[Experiment]:
    return [experiment(clients=clients, rounds=2) for clients in (3, 4, 5)]


def play(out: Path) -> tuple[list[int], dict[int, int]]:
    """Return the runs that were begun here, in order, and the rounds of each run in the end."""
    begun, ended = [], {}
    for event in play_all(sweep(), [out] * 3, SERIAL):
        if isinstance(event, RunBegun):
            begun.append(event.at)
        elif isinstance(event, RunEnded):
            ended[event.at] = event.summary["rounds"]
    return begun, ended


def taken(out: Path, number: int) -> Lock:
    """Lock a run's folder, as another process would."""
    folder = out / folder_name(sweep()[number])
    folder.mkdir(parents=True)
    lock = Lock(folder)
    lock.take()
    return lock


def test_what_another_process_writes_is_left_to_it(tmp_path: Path) -> None:
    lock = taken(tmp_path, 0)
    assert play(tmp_path) == ([1, 2], {0: 0, 1: 2, 2: 2})
    with pytest.raises(InputError, match=f"process {os.getpid()}"):
        play(tmp_path)  # nothing else is left to do
    lock.give_back()
    assert play(tmp_path) == ([0], {0: 2, 1: 2, 2: 2})


def test_what_another_process_has_given_up_is_taken_over(tmp_path: Path) -> None:
    lock, events = taken(tmp_path, 0), play_all(sweep(), [tmp_path] * 3, SERIAL)
    ended = {}
    for event in events:
        if isinstance(event, RunBegun):
            lock.give_back()
        elif isinstance(event, RunEnded):
            ended[event.at] = event.summary["rounds"]
    assert ended == {0: 2, 1: 2, 2: 2}


PROGRAM = """
import sys
from pathlib import Path
from test_sharing import play
print(len(play(Path(sys.argv[1]))[0]))
"""


@pytest.mark.long
def test_three_processes_divide_a_sweep_and_leave_what_one_leaves(tmp_path: Path) -> None:
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*folders, *sys.path])}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "shared")]
    several = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) for _ in range(3)]
    errors = [process.communicate(timeout=120)[1].decode() for process in several]
    play(tmp_path / "alone")
    assert all("Traceback" not in error or "BusyError" in error for error in errors), errors
    assert content(tmp_path / "shared") == content(tmp_path / "alone")
    assert all(record.finished for record in survey(tmp_path / "shared").records)
