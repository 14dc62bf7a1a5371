"""Commands whose standard streams are closed, or cannot show every character."""

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from commandline import Feddkd
from made_up import make

COMMAND = f'"{sys.executable}" -m feddkd'
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    make(out, methods=1, seeds=2, rounds=2)
    return out


def shell(line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Call a shell without a home and with these variables alone."""
    path = os.pathsep.join(sys.path)
    return subprocess.run(
        ["sh", "-c", line],
        env={"PYTHONPATH": path, "PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("closed", ["2>&-", "2>&- >&-", "<&-"])
def test_a_closed_stream_changes_nothing_else(closed: str, runs: Path) -> None:
    page = runs / "page.html"
    assert shell(f"{COMMAND} report {runs} --out {page} {closed}").returncode == 0
    assert page.read_text().rstrip().endswith("</html>")
    page.unlink()


def test_a_mistake_has_its_status_without_a_stream_to_tell_it(tmp_path: Path) -> None:
    assert shell(f"{COMMAND} ls {tmp_path / 'nowhere'} 2>&-").returncode == 2


def test_characters_that_a_stream_lacks_are_replaced(runs: Path) -> None:
    done = shell(f"{COMMAND} report {runs}", **ASCII)
    assert done.returncode == 0, done.stderr
    assert "fedavg" in done.stdout


class Full(io.TextIOBase):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_lines_that_cannot_be_printed_end_no_run(
    feddkd: Feddkd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Full())
    assert feddkd("run", "tiny.toml", "--engine", "serial", "--out", "here").status == 0
    assert list(Path("here").glob("*/summary.json"))
