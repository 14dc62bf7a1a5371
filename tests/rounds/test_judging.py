"""Evaluations of some rounds and some clients change no number of a run but the ones they omit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from commandline import Feddkd
from feddkd import Experiment, InputError, Result, simulate
from feddkd.reports import curves
from feddkd.reports.html.page import html as write_page
from feddkd.reports.tables import grid
from feddkd.rounds.evaluation import Evaluation
from feddkd.rounds.metrics import ACCURACY
from feddkd.runs.record import find
from old_files import read_json
from small import clients, distance, network, pooled

DATA = clients(sizes=(10, 12, 14, 16, 18))
LOCAL = "epochs=1, batch_size=8, lr=0.1"


def run(method: str, **options: Any) -> Result:
    return simulate(
        model=network(),
        clients=DATA,
        test=pooled(DATA),
        validation=DATA[0],
        method=method,
        rounds=7,
        progress=False,
        **{"engine": "serial", **options},
    )


@pytest.mark.parametrize(
    "method",
    [
        f"fedavg({LOCAL})",
        f"fedavg({LOCAL}) | dkd(steps=1, lr=0.1)",
        f"fedavg({LOCAL}) | dkd(steps=1, lr=0.1) | fine_tune({LOCAL})",
    ],
)
def test_the_rounds_that_are_evaluated_are_those_of_a_run_that_evaluates_all(method: str) -> None:
    whole, some = run(method), run(method, evaluate_every=3)
    assert distance(some.params, whole.params) == 0
    judged = []
    for all_of_it, row in zip(whole.history, some.history, strict=True):
        if "test_accuracy" in row:
            assert row == all_of_it
            judged.append(row["round"])
        else:
            assert row == {
                key: value
                for key, value in all_of_it.items()
                if not key.startswith(("test_", "validation_", "average_"))
            }
    assert judged == [1, 3, 6, 7]
    best = max(
        (row for row in some.history if row["round"] in judged),
        key=lambda row: (row["validation_accuracy"], -row["round"]),
    )
    assert some.summary["best_round"] == best["round"]
    assert some.summary["final_test_accuracy"] == whole.history[-1]["test_accuracy"]


@pytest.mark.parametrize(
    "method", [f"local_only({LOCAL})", f"fedavg({LOCAL}) | fine_tune({LOCAL})"]
)
def test_some_clients_stand_for_all(method: str) -> None:
    whole, some = run(method), run(method, evaluate_clients=0.4)
    chosen = Evaluation(clients=0.4).chosen(5)
    assert len(chosen) == 2
    for all_of_it, row in zip(whole.history, some.history, strict=True):
        of_all, of_some = all_of_it["test_client_accuracy"], row["test_client_accuracy"]
        assert of_some == [of_all[k] if k in chosen else None for k in range(5)]
        assert row["test_accuracy"] == pytest.approx(sum(of_all[k] for k in chosen) / 2)


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_clients_that_were_tuned_and_others_distil_together(engine: str) -> None:
    text = f"fedavg({LOCAL}) | dkd(steps=1, lr=0.1) | fine_tune({LOCAL})"
    whole, some = (run(text, engine=engine, evaluate_clients=each) for each in (1.0, 4))
    assert distance(some.params, whole.params) < 1e-12


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_confusion_and_success_are_those_of_the_clients_that_are_evaluated(
    engine: str, tmp_path: Path
) -> None:
    images = [(x.repeat(1, 5).reshape(-1, 1, 5, 5), y) for x, y in DATA]
    result = simulate(
        model=nn.Sequential(nn.Flatten(), nn.Linear(25, 3)).double(),
        clients=images,
        test=images[0],
        method=f"fedavg({LOCAL}) | fine_tune(epochs=5, lr=0.5)",
        rounds=3,
        evaluate_every=3,
        evaluate_clients=2,
        attack="backdoor(clients='0', size=1)",
        evaluation="client_pooled",
        engine=engine,
        out=tmp_path,
    )
    counts = torch.tensor(read_json(next(tmp_path.rglob("confusion.json")))["counts"])
    assert int(counts.sum()) == 2 * len(images[0][0])
    row = result.history[-1]
    assert int(counts.trace()) / int(counts.sum()) == pytest.approx(row["test_accuracy"])
    assert ["attack_success" in row for row in result.history] == [True, False, True]


@pytest.mark.parametrize(("asked", "count"), [(1.0, 8), (8, 8), (3, 3), (1, 1), (0.01, 1), (20, 8)])
def test_as_many_clients_are_chosen_as_are_asked_for(asked: int | float, count: int) -> None:
    found = Evaluation(clients=asked).chosen(8)
    assert len(found) == count
    assert found == tuple(sorted(set(found)))


def test_the_usual_values_stay_out_of_digests() -> None:
    usual = Experiment("fedavg()").digest
    assert Experiment("fedavg()", evaluate_every=1, evaluate_clients=1.0).digest == usual
    assert Experiment("fedavg()", evaluate_every=2).digest != usual
    with pytest.raises(InputError, match="evaluate_every"):
        Experiment("fedavg()", evaluate_every=0)


def test_reports_show_runs_of_which_some_rounds_are_evaluated(
    feddkd: Feddkd, tmp_path: Path
) -> None:
    settings = ["--set", "rounds=7", "--set", "evaluate_every=4", "--set", "target=0.1"]
    assert feddkd("run", "tiny.toml", "--out", "runs", *settings).status == 0
    records = find(Path("runs"))
    band = curves.band(records[:1], curves.on_test(ACCURACY))
    assert band is not None
    assert (band.mean == band.mean).tolist() == [True, False, False, True, False, False, True]
    heads, lines = grid(records)
    assert all("-" not in line[heads.index("last")] for line in lines)
    assert write_page(records)
    for command in (["ls", "runs"], ["report", "runs"], ["report", "runs", "--out", "page.html"]):
        assert feddkd(*command).status == 0
