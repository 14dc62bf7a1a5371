"""The spread of a metric over clients, against numpy; in summaries and tables."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commandline import Feddkd
from feddkd import load
from feddkd.reports.tables import caption, grid
from feddkd.rounds.metrics import METRICS
from feddkd.runs.client_spread import client_spread
from feddkd.runs.record import find
from feddkd.runs.summary import best_row

VALUES = st.lists(st.one_of(st.none(), st.just(math.nan), st.floats(0, 1)), min_size=1, max_size=40)


@given(VALUES, st.sampled_from(["accuracy", "rmse"]))
def test_the_spread_is_that_of_numpy(values: list[float | None], name: str) -> None:
    metric = METRICS[name]
    found = client_spread({metric.client_key: values}, metric)
    there = np.array([value for value in values if value is not None and not math.isnan(value)])
    if not len(there):
        assert found is None
        return
    assert found is not None
    assert found["clients"] == len(there)
    assert found["mean"] == pytest.approx(there.mean())
    assert found["std"] == pytest.approx(there.std(), abs=1e-9)
    tenth, ordered = max(1, round(len(there) / 10)), np.sort(there)
    worst = ordered[:tenth] if name == "accuracy" else ordered[-tenth:]
    assert found["worst_tenth"] == pytest.approx(worst.mean())
    for text, value in found["quantiles"].items():
        share = float(text.removesuffix(" %")) / 100
        assert value == pytest.approx(np.quantile(there, share))


def test_a_row_of_a_global_model_has_no_spread() -> None:
    assert client_spread({"test_accuracy": 0.5}, METRICS["accuracy"]) is None


def test_the_worst_clients_are_in_summaries_and_tables(feddkd: Feddkd, tmp_path: Path) -> None:
    done = feddkd("run", "tiny.toml", "--out", "runs", "--set", "evaluation=client_mean")
    assert done.status == 0
    records = find(Path("runs"))
    heads, lines = grid(records)
    assert "worst 10 %" in heads
    assert any("worst 10 %" in line for line in caption(records))
    run = load("runs")[0]
    worst = min(best_row(run.history)["test_client_accuracy"])
    assert run.summary["clients"]["accuracy"]["worst_tenth"] == pytest.approx(worst)
    assert any(f"{100 * worst:.2f}" in line[heads.index("worst 10 %")] for line in lines)
