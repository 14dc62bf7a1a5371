"""Each write, sync and rename of a run fails once, fails for good, or is the last thing done."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from feddkd import Experiment, InputError
from feddkd.runs import files, lock, recorder
from feddkd.runs.record import survey
from feddkd.runs.runner import execute
from feddkd.runs.session import Every
from interrupted import content

CALLS = ("write", "fsync", "replace", "truncate", "ftruncate")


class PowerFailure(BaseException):  # no `except Exception` may stop it
    """Nothing reaches the disk any more."""


class FaultyDisk:
    """The module `os`, whose n-th call that changes a file fails."""

    def __init__(self, fails_at: int, kind: str) -> None:
        self.fails_at, self.kind, self.calls = fails_at, kind, 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self._counted(name, real) if name in CALLS else real

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            self.calls += 1
            if self.calls < self.fails_at or (self.kind == "once" and self.calls > self.fails_at):
                return real(*given)
            if name == "write" and self.calls == self.fails_at:
                real(given[0], bytes(given[1])[: len(given[1]) // 2])
            if self.kind == "power":
                raise PowerFailure
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        return call


def play(out: Path) -> None:
    small: dict[str, Any] = {"model": "mlp(hidden='2')", "clients": 2, "rounds": 2}
    one = Experiment(method="fedavg(epochs=1, batch_size=999)", **small)
    execute([one], out=out, engine="serial", every=Every(rounds=1))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole")
    play(out)
    return content(out)


def fail(out: Path, n: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> BaseException | None:
    """Run with a disk that fails at its n-th call; return the error."""
    disk = FaultyDisk(n, kind)
    with monkeypatch.context() as patch:
        for module in (files, lock, recorder):
            patch.setattr(module, "os", disk)
        try:
            play(out)
        except (OSError, InputError, PowerFailure) as error:
            return error
    return None


@pytest.mark.parametrize("kind", ["once", "for good", "power"])
def test_whatever_write_fails_the_run_goes_on_later_to_the_same_files(
    kind: str, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = 0
    for n in range(1, 500):
        out = tmp_path / str(n)
        error = fail(out, n, kind, monkeypatch)
        if error is None:
            break
        failed += 1
        assert isinstance(error, PowerFailure) or str(out) in str(error), n
        if any(out.rglob("manifest.json")):
            assert not survey(out, begun=True).errors, f"{n}: what is left counts as damaged"
        play(out)
        assert content(out) == whole, n
    assert 40 < failed < 400
