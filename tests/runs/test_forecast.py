"""Tests of the forecast of time, memory and bytes."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from feddkd import Experiment
from feddkd.cli.app import main
from feddkd.cli.console import clock
from feddkd.rounds.costs import Costs
from feddkd.rounds.evaluation_phases import judging
from feddkd.runs.forecast import TimedExchange, _seconds, forecast
from feddkd.runs.runner import How, execute


def tiny(**keys: Any) -> Experiment:
    common = {
        "partition": "classes(per_client=2)",
        "model": "mlp(hidden='8')",
        "clients": 5,
        "cohort": 0.6,
        "rounds": 4,
    }
    return Experiment(**{"method": "fedavg(epochs=2, batch_size=16)", **common, **keys})


SERIAL = How("serial")


@pytest.mark.parametrize(
    "keys",
    [
        {"method": "fedavg(epochs=2, batch_size=16) | dkd(steps=3, warmup=2)"},
        {"method": "scaffold(epochs=1)"},
        {"method": "feddistill(epochs=1)"},
        {"method": "fedbabu(epochs=1, tune_epochs=2)"},
        {"method": "fedavg(epochs=1) | topk(share=0.1)", "selection": "power_of_choice()"},
    ],
)
def test_bytes_are_foretold_exactly(tmp_path: Path, keys: dict[str, str]) -> None:
    experiment = tiny(**keys)
    told = forecast([experiment], SERIAL)
    (summary,) = execute([experiment], out=tmp_path, engine="serial")
    assert (told.bytes_up, told.bytes_down) == (summary["bytes_up"], summary["bytes_down"])
    assert told.engine == "serial"
    assert 0 < told.seconds < 120
    assert told.memory is None or told.memory > 50_000_000  # torch alone is more


def test_fine_tuning_before_an_evaluation_takes_time() -> None:
    text = "fedavg(epochs=1) | fine_tune(epochs={}, batch_size=2)"
    short, long = (forecast([tiny(method=text.format(n))], SERIAL).seconds for n in (1, 500))
    assert long > 20 * short


def test_what_is_done_is_not_foretold_again() -> None:
    told = [forecast([tiny()], SERIAL, done) for done in (0, 3)]
    assert told[0].bytes_up == 4 * told[1].bytes_up


def test_of_the_first_rounds_alone_no_more_is_foretold() -> None:
    told = [forecast([tiny()], How("serial", until=until)) for until in (None, 1, 9)]
    assert told[0].bytes_up == 4 * told[1].bytes_up == told[2].bytes_up


def test_an_exchange_takes_what_lies_on_the_line_through_two_trials() -> None:
    few, more = (
        [TimedExchange(judging("test"), seconds, steps, Costs())]
        for seconds, steps in ((3.0, 2.0), (5.0, 6.0))
    )
    assert _seconds(few, more, 12.0) == pytest.approx(8.0)
    assert _seconds(few, few, 2.0) == pytest.approx(3.0)
    assert _seconds(more, more, 2.0) == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.123, "0.12 s"), (42.4, "42 s"), (3600, "1 h 0 min"), (119, "2 min")]
)
def test_times_are_said_as_people_say_them(seconds: float, said: str) -> None:
    assert clock(seconds) == said


def test_a_dry_run_says_what_is_to_do_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    experiment = tiny(rounds=2)
    keys = {**experiment.as_dict(), "seed": None}
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items() if value is not None]
    Path("tiny.toml").write_text("\n".join([*lines, "[sweep]", "seed = [0, 1, 2]"]))
    (summary,) = execute([experiment], out=Path("runs"), engine="serial")
    before = sorted(Path("runs").rglob("*"))
    monkeypatch.setattr(
        sys, "argv", ["feddkd", "run", "tiny.toml", "--dry-run", "--engine", "serial", "--json"]
    )
    with pytest.raises(SystemExit) as caught:
        main()
    told = json.loads(capfd.readouterr().out)
    assert caught.value.code in (0, None)
    assert (told["runs"], told["finished"], told["groups"][0]["engine"]) == (2, 1, "serial")
    assert told["bytes"] == 2 * (summary["bytes_up"] + summary["bytes_down"])
    assert sorted(Path("runs").rglob("*")) == before
