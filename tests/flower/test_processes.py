"""Started processes end when their block ends, when it raises, and when we are killed."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from feddkd import InputError
from feddkd.flower.deployment.processes import Processes

SLEEPER = [sys.executable, "-c", "import time; time.sleep(100)"]
DEAF = (
    "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True);"
    " time.sleep(100)"
)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids: list[int], seconds: float = 10.0) -> bool:
    limit = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < limit:
        time.sleep(0.02)
    return not any(map(alive, pids))


def test_a_block_that_breaks_ends_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feddkd.flower.deployment.processes.PATIENCE", 0.3)
    pids: list[int] = []

    def broken() -> None:
        with Processes(tmp_path) as processes:
            processes.start("polite", SLEEPER)
            processes.start("stubborn", [sys.executable, "-c", DEAF])
            while "deaf" not in processes.log_end("stubborn"):
                time.sleep(0.02)
            pids.extend(process.pid for process in processes.running.values())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken()
    assert len(pids) == 2
    assert not any(map(alive, pids))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux's")
def test_what_we_started_ends_with_us_even_if_we_are_killed(tmp_path: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
from feddkd.flower.deployment.processes import Processes
processes = Processes(Path({str(tmp_path)!r}))
processes.start("child", {SLEEPER!r})
print(processes.running["child"].pid, flush=True)
time.sleep(100)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert gone([child])


def test_one_that_has_ended_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        processes.start("mayfly", [sys.executable, "-c", "print('too short'); raise SystemExit(3)"])
        processes.running["mayfly"].wait()
        with pytest.raises(InputError, match="mayfly has ended with status 3: too short"):
            processes.check()
