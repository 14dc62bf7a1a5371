"""One thread:

the networks here are small, and two processes that each spin two threads on two cores wait for each
other.
"""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from commandline import TINY, Done, Feddkd
from feddkd.cli.app import main
from feddkd.runs import prepare

torch.set_num_threads(1)
# choices by timing are kept nowhere, and none is found
os.environ["FEDDKD_CACHE"] = "off"
# shells let what they start in the background ignore it
signal.signal(signal.SIGINT, signal.default_int_handler)

with suppress(ImportError):  # a machine with a GPU may have pytest and no more
    from hypothesis import settings

    # how long an example takes says nothing on a shared machine
    settings.register_profile("patient", deadline=None)
    settings.load_profile("patient")


@pytest.fixture
def feddkd(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Feddkd:
    """Call the command line in this process, in an empty folder with one small experiment,
    tiny.toml.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDDKD_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    Path("tiny.toml").write_text(TINY)

    def call(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["feddkd", *arguments])
        prepare._load.cache_clear()  # a real command starts in a new process
        with pytest.raises(SystemExit) as caught:
            main()
        return Done(int(caught.value.code or 0), *capfd.readouterr())

    return call
