"""Runs of methods with a state for each client that were cut short go on to the same bits."""

from pathlib import Path

import pytest

from feddkd.runs.runner import execute
from interrupted import ENGINES, OFTEN, content, experiment
from test_resume import cut

TEXTS = {
    "fedbabu": "fedbabu(epochs=1, batch_size=32, tune_epochs=1) | dkd(steps=1)",
    "apfl": "apfl(epochs=1, batch_size=32)",
    "fedamp": "fedamp(epochs=1, batch_size=32)",
    "server": "aso_fed(epochs=1, batch_size=32) | mix2fld(epochs=1, server_steps=5)",
}


@pytest.mark.parametrize(
    ("name", "engine"),
    [("fedbabu", "batched"), ("apfl", "pool"), ("fedamp", "batched"), ("server", "batched")],
)
def test_a_run_cut_short_goes_on_to_the_same_bits(name: str, engine: str, tmp_path: Path) -> None:
    runs = [experiment(TEXTS[name], rounds=4, seed=seed, split_seed=0) for seed in (0, 1)]
    execute(runs, out=tmp_path / "whole", **ENGINES[engine])
    cut(3, runs, tmp_path / "cut", **ENGINES[engine])
    execute(runs, out=tmp_path / "cut", every=OFTEN, **ENGINES[engine])
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
