"""Personalised methods over the Grid without processes: facts of the nodes' own examples, personal
models that stay there, phases before an evaluation, and sums of a layer's inputs.
"""

from pathlib import Path

import pytest

from feddkd.flower.apps import NodeApp
from flower_double import DKD, LOCAL, Double, check_same
from test_flower import cut_short, flower, serial

TEXTS = {
    "fedrep": f"fedrep({LOCAL}, head_epochs=1) | {DKD}",
    "fedbabu": f"fedbabu({LOCAL}, tune_epochs=1) | {DKD}",
    "ditto": f"ditto({LOCAL})",
    "per_fedavg": f"per_fedavg({LOCAL})",
    "fedfomo": f"fedfomo({LOCAL}, models=1, spare=8)",
    "regmean": f"fedavg({LOCAL}) | regmean() | {DKD}",
    "ccvr": f"fedavg({LOCAL}) | ccvr(server_steps=3)",
}


@pytest.mark.parametrize("name", TEXTS)
def test_flower_gives_what_serial_gives(name: str, tmp_path: Path) -> None:
    serial(tmp_path / "serial", TEXTS[name], cohort=2)
    flower(tmp_path / "flower", TEXTS[name], cohort=2)
    check_same(tmp_path / "serial", tmp_path / "flower")


@pytest.mark.parametrize("name", ["fedbabu", "ditto"])
def test_a_server_goes_on_from_its_checkpoint_with_the_same_numbers(
    name: str, tmp_path: Path
) -> None:
    serial(tmp_path / "serial", TEXTS[name])
    grid = Double(NodeApp(), 3)
    cut_short(tmp_path / "flower", TEXTS[name], grid)
    flower(tmp_path / "flower", TEXTS[name], grid)
    check_same(tmp_path / "serial", tmp_path / "flower")
