"""Absurd and odd settings: refused with the numbers, or played with a line about them."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from commandline import Feddkd
from feddkd import Experiment, InputError, parse, simulate
from feddkd.errors import RunError
from feddkd.experiment import load
from feddkd.rounds import demands
from feddkd.rounds.demands import check_demands
from feddkd.rounds.remarks import remarks

PAIR = torch.randn(8, 3), torch.arange(8) % 2


def played(method: str, **more: Any) -> Any:
    net = nn.Linear(3, 2)
    return simulate(model=net, clients=[PAIR] * 3, test=PAIR, method=method, **more)


def test_a_rate_beyond_the_largest_number_diverges_as_any_large_rate_does() -> None:
    for method in ("fedavg(lr=1e300, epochs=1)", "fedavg(epochs=1) | dkd(lr=1e300, steps=2)"):
        with pytest.raises(RunError, match="finite"):
            played(method, engine="serial")


@pytest.mark.parametrize(
    ("method", "amount"),
    [("fedavg(epochs=10000000000)", "GiB"), ("fedavg(epochs=1) | dkd(steps=10000000)", "10000001")],
)
def test_more_than_a_machine_can_hold_is_refused_with_the_number(method: str, amount: str) -> None:
    with pytest.raises(InputError, match=amount):
        played(method)


def test_a_cohort_whose_models_do_not_fit_is_refused_and_one_that_fits_is_not() -> None:
    params, method = {"w": torch.zeros(1000)}, parse("fedavg()")
    check_demands(method, params, 10, [5], free=80_000)
    with pytest.raises(InputError, match=r"78\.1 KiB"):
        check_demands(method, params, 10, [5], free=79_999)


def test_a_run_is_refused_before_it_writes_a_file(
    tmp_path: Path, feddkd: Feddkd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demands, "MOST_EXCHANGES", 3)
    (tmp_path / "e.toml").write_text('method = "fedavg(epochs=1) | dkd(steps=3)"')
    done = feddkd("run", str(tmp_path / "e.toml"), "--out", str(tmp_path / "runs"))
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert not list((tmp_path / "runs").rglob("*"))


def test_what_takes_more_than_a_day_needs_a_yes(tmp_path: Path, feddkd: Feddkd) -> None:
    (tmp_path / "e.toml").write_text(
        'method = "fedavg(epochs=1)"\nmodel = "mlp(hidden=\'2\')"\nrounds = 1000000000000000000\n'
    )
    command = "run", str(tmp_path / "e.toml"), "--engine", "serial", "--out", str(tmp_path / "runs")
    done = feddkd(*command)
    assert done.status == 2
    assert "years" in done.err
    assert "--yes" in done.err


def test_a_forecast_of_phases_with_a_warm_up_counts_the_rounds_that_play_them() -> None:
    for warmup, last in ((0, None), (3, None), (2, 7), (0, 4), (9, 3)):
        method = parse(f"fedavg(epochs=1) | dkd(steps=4, warmup={warmup})")
        for phase in method.phases:
            repeat = phase.repeat if last is None else type(phase.repeat)(4, warmup, last)
            for first in (1, 3, 6):
                counted = sum(repeat(t) for t in range(first, 11))
                assert repeat.total(first, 10) == counted


@pytest.mark.parametrize(
    ("method", "cohort", "count"),
    [
        ("fedavg() | dkd()", 1.0, 0),
        ("fedavg() | dkd()", 1e-9, 1),
        ("fedavg() | dkd()", 0.1, 0),
        ("fedavg() | fedavg()", 0.5, 1),
        ("fedavg(nesterov=True)", 0.5, 1),
        ("fedavg(nesterov=True, momentum=0.9)", 0.5, 0),
        ("fedavg(lr_decay=2.0)", 0.5, 1),
        ("fedavg()", 1, 1),
    ],
)
def test_an_odd_setting_has_one_line(method: str, cohort: float, count: int) -> None:
    assert len(list(remarks(parse(method), cohort, 10))) == count


def test_batches_larger_than_any_client_have_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        played("fedavg(epochs=1, batch_size=9)", engine="serial")
        played("fedavg(epochs=1, batch_size=8)", engine="serial")
    assert [line for line in caplog.messages if "batch_size" in line and "9" in line]
    assert not [line for line in caplog.messages if "batch_size = 8" in line]


def test_texts_of_other_encodings_are_read_or_refused_in_a_line(tmp_path: Path) -> None:
    file, text = tmp_path / "e.toml", 'method = "fedavg(epochs=1)"\r\nname = "\u00b1"\r\n'
    for encoding in ("utf-8", "utf-8-sig"):
        file.write_bytes(text.encode(encoding))
        assert load(file)[0].name == "\u00b1"
    for encoding in ("utf-16", "latin-1"):
        file.write_bytes(text.encode(encoding))
        with pytest.raises(InputError, match="UTF-8"):
            load(file)


def test_a_vast_sweep_and_a_huge_name_are_refused_at_once(tmp_path: Path) -> None:
    file, values = tmp_path / "e.toml", list(range(1, 1001))
    file.write_text(f'method = "fedavg()"\n[sweep]\nseed = {values}\nrounds = {values}\n')
    with pytest.raises(InputError, match="1000000 combinations"):
        load(file)
    with pytest.raises(InputError, match="1000001 characters"):
        Experiment("fedavg()", name="x" * 1_000_001)
