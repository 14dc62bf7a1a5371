"""An operator sees a federation: status, metrics, and logs that do not grow for ever."""

import json
import logging
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import Message

from feddkd import Experiment, InputError
from feddkd.cli.flower_runs import stamped
from feddkd.cli.flower_status import status as status_command
from feddkd.flower.apps import NodeApp, engine_on
from feddkd.flower.deployment.metrics_server import serving_metrics
from feddkd.flower.deployment.processes import Processes, free_port
from feddkd.flower.status import FILE, Status, metrics, read_status
from feddkd.runs.runner import execute
from flower_double import FEDDKD, SETTING, Double, rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a server whose client 1 did not answer in the last exchange."""

    def tamper(part: int, asked: Message, reply: Message) -> Message | None:
        last = '"key": [3, 2, 1, 2]' in str(asked.content.config_records["page"]["json"])
        return None if part == 1 and last else reply

    experiment = Experiment(**{**SETTING, "method": FEDDKD, "name": 'a "name"'})
    grid, status = Double(NodeApp(), 3, tamper), Status(tmp_path / FILE)
    options: dict[str, Any] = {"deadline": 0.05, "join": 0.3, "poll": 0.0, "status": status}
    execute([experiment], out=tmp_path / "runs", engine=engine_on(grid, experiment, **options))
    return tmp_path


def test_the_status_says_who_has_answered_and_what_was_sent(folder: Path) -> None:
    found = read_status(folder)
    assert (found["round"], found["rounds"], found["phase"], found["step"]) == (2, 2, "distil", 2)
    assert {client: one["answers"] for client, one in found["clients"].items()} == {
        "0": 6,
        "1": 5,
        "2": 6,
    }
    assert found["clients"]["1"]["failures"] == 1
    last = rows(folder / "runs")[-1]
    down = sum(one["bytes_down"] for one in found["clients"].values())
    assert last["bytes_down"] < down < 3 * last["bytes_down"]  # with headers, in tiny messages


def test_the_command_shows_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status_command(folder)
    shown = capsys.readouterr().out
    assert "round 2 of 2" in shown
    status_command(folder, as_json=True)
    assert json.loads(capsys.readouterr().out)["clients"]["2"]["answers"] == 6
    with pytest.raises(InputError, match=FILE):
        status_command(folder / "runs")


def test_the_metrics_are_in_the_format_of_prometheus(folder: Path) -> None:
    lines = metrics(read_status(folder)).splitlines()
    form = re.compile(r'[a-z_]+(\{([a-z]+="(\\.|[^"\\])*",?)+\})? [0-9.]+')
    assert all(form.fullmatch(line) for line in lines), lines
    assert sum(line.startswith("feddkd_client_answers") for line in lines) == 3
    assert 'run="a \\"name\\""' in lines[0]


def test_metrics_and_health_are_served_on_this_machine(folder: Path) -> None:
    port = free_port()
    with serving_metrics(folder, port):
        for page, part in (("health", "ok"), ("metrics", "feddkd_round{")):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{page}", timeout=5) as answer:
                assert part in answer.read().decode()
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/etc", timeout=5)
        with (
            pytest.raises(InputError, match=f"cannot listen on 127.0.0.1:{port}"),
            serving_metrics(folder, port),
        ):
            pass
    with serving_metrics(folder, None):
        pass


def test_lines_of_the_log_have_the_time_and_files_are_begun_anew(tmp_path: Path) -> None:
    handler = stamped(tmp_path / "log" / "server.log")
    assert isinstance(handler, logging.handlers.RotatingFileHandler)
    handler.maxBytes = 300
    for number in range(20):
        record = logging.LogRecord("feddkd", logging.INFO, "", 0, f"line {number}", None, None)
        handler.handle(record)
    handler.close()
    files = sorted((tmp_path / "log").iterdir())
    assert 1 < len(files) <= 10
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ INFO line", files[0].read_text())


def test_the_log_of_a_process_that_writes_on_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feddkd.flower.deployment.processes.MOST_LOG", 1000)
    write = "import time\nwhile True: print('x' * 99, flush=True); time.sleep(0.001)"
    with Processes(tmp_path) as processes:
        processes.start("writer", [sys.executable, "-c", write])
        while not (tmp_path / "writer.log.1").exists():
            processes.limit_logs()
        assert (tmp_path / "writer.log.1").stat().st_size > 1000
        before = (tmp_path / "writer.log").stat().st_size
        while (tmp_path / "writer.log").stat().st_size <= before:
            processes.check()
        assert not (tmp_path / "writer.log").read_text().startswith("\0")
