"""Metrics against scikit-learn, on every engine, and from an experiment to its report."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from sklearn.metrics import f1_score, roc_auc_score
from torch import Tensor
from torch.func import vmap

from commandline import Feddkd
from feddkd import Experiment, InputError, simulate
from feddkd.engines.compile.simplify import trimmed
from feddkd.method import Batch
from feddkd.reports.html.chart_data import figures
from feddkd.reports.html.page import html as write_page
from feddkd.reports.html.verdicts import ranked, verdicts
from feddkd.reports.tables import as_json, grid
from feddkd.rounds.evaluation_phases import ONE_OF_TWO, judging
from feddkd.rounds.loop import _good
from feddkd.rounds.metrics import ACCURACY, DEFAULT, METRICS, Metric, find_metrics, headline
from feddkd.rounds.metrics import register as add
from feddkd.rounds.turns import Turn
from feddkd.runs.record import find
from feddkd.runs.runner import execute
from feddkd.runs.summary import summarise
from made_up import make
from small import clients, network, pooled

ALL = ("accuracy", "loss", "macro_f1", "auc")
NAN = float("nan")


def predictions(
    n: int, classes: int, absent: Sequence[int] = (), scale: float = 1.0, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return logits and labels. No example has the label of an absent class; the first of these
    classes is never predicted.
    """
    draw = torch.Generator().manual_seed(seed)
    present = torch.tensor([c for c in range(classes) if c not in absent])
    y = present[torch.randint(0, len(present), (n,), generator=draw)]
    logits = torch.randn(n, classes, generator=draw, dtype=torch.float64)
    logits[torch.arange(n), y] += 1
    logits[:, list(absent[:1])] -= 20
    return scale * logits, y


def batch_of(y: Tensor, padding: int = 0) -> Batch:
    """Return a batch with these labels; the last examples are padding."""
    share = torch.full((len(y),), 1 / max(len(y) - padding, 1), dtype=torch.float64)
    share[len(y) - padding :] = 0
    return Batch(y, y, share, torch.tensor(0))


def value(metric: Metric, logits: Tensor, y: Tensor) -> float:
    return metric.value(metric.sums(logits, batch_of(y))).item()


def exact_auc(logits: Tensor, y: Tensor) -> float:
    """Return the mean of scikit-learn's AUC over classes that some examples have, not all."""
    scores = logits.double().log_softmax(1).numpy()
    each = []
    for label in range(logits.shape[1]):
        positive = (y == label).numpy()
        if positive.any() and not positive.all():
            each.append(roc_auc_score(positive, scores[:, label]))
    return float(np.mean(each)) if each else NAN


def exact(name: str, logits: Tensor, y: Tensor) -> float:
    taken = logits.argmax(1)
    if name == "accuracy":
        return float((taken == y).double().mean())
    if name == "loss":
        return float(
            (logsumexp(logits.numpy(), 1) - logits[torch.arange(len(y)), y].numpy()).mean()
        )
    return exact_auc(logits, y) if name == "auc" else float(f1_score(y, taken, average="macro"))


TOLERANCE = {"accuracy": 1e-12, "loss": 1e-9, "macro_f1": 1e-12, "auc": 1e-3}


# --- the numbers


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("absent", [(), (1,), (0, 4, 5)])
@pytest.mark.parametrize("scale", [0.05, 1.0, 30.0])
def test_a_metric_equals_scikit_learns(name: str, absent: Sequence[int], scale: float) -> None:
    for seed in range(3):
        logits, y = predictions(700, 6, absent, scale, seed)
        found, wanted = value(METRICS[name], logits, y), exact(name, logits, y)
        assert found == pytest.approx(wanted, rel=1e-6, abs=TOLERANCE[name])


def test_two_classes_and_ties_have_an_exact_auc() -> None:
    logits = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 2.0], [0.0, -1.0], [0.0, 1.0]])
    y = torch.tensor([1, 0, 1, 0, 1])
    assert value(METRICS["auc"], logits, y) == pytest.approx(exact_auc(logits, y), abs=1e-12)


def test_auc_is_not_defined_without_both_kinds_of_examples() -> None:
    logits, y = predictions(20, 3)
    assert np.isnan(value(METRICS["auc"], logits, torch.zeros_like(y)))


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_break_no_metric(bad: float) -> None:
    logits, y = predictions(20, 3)
    for metric in (METRICS[name] for name in ALL):
        metric.value(metric.sums(torch.full_like(logits, bad), batch_of(y)))


@pytest.mark.parametrize("metric", [METRICS[name] for name in ALL], ids=lambda metric: metric.name)
def test_sums_of_parts_add_up_and_padding_adds_nothing(metric: Metric) -> None:
    logits, y = predictions(50, 4)
    whole = metric.sums(logits, batch_of(y))
    first = metric.sums(logits[:20], batch_of(y[:20]))
    padded = metric.sums(
        torch.cat([logits[20:], logits[:7]]), batch_of(y[[*range(20, 50), *range(7)]], 7)
    )
    for name, tensor in whole.items():
        assert tensor.dtype == torch.float64
        torch.testing.assert_close(first[name] + padded[name], tensor, rtol=1e-12, atol=1e-12)
    nothing = metric.sums(logits, batch_of(y, len(y)))
    assert not any(tensor.any() for tensor in nothing.values())


@pytest.mark.parametrize("metric", [METRICS[name] for name in ALL], ids=lambda metric: metric.name)
def test_a_metric_can_be_vectorised_over_clients(metric: Metric) -> None:
    lanes = [predictions(30, 4, seed=seed) for seed in range(3)]
    logits = torch.stack([lane[0] for lane in lanes])
    batches = [batch_of(y) for _, y in lanes]
    sums = vmap(metric.sums)(logits, Batch(*map(torch.stack, zip(*batches, strict=True))))
    each = [value(metric, *lane) for lane in lanes]
    torch.testing.assert_close(metric.value(sums).tolist(), each, rtol=1e-12, atol=0)


@pytest.mark.parametrize("metric", [METRICS[name] for name in ALL], ids=lambda metric: metric.name)
def test_a_metric_can_be_traced(metric: Metric) -> None:
    """A trace from one batch gives the sums of another one, with padding."""

    def flat(logits: Tensor, *batch: Tensor) -> list[Tensor]:
        return list(metric.sums(logits, Batch(*batch)).values())

    first, second = (predictions(30, 4, seed=seed) for seed in range(2))
    traced = trimmed(flat, first[0], *batch_of(first[1]))
    batch = batch_of(second[1], 5)
    for ours, theirs in zip(traced(second[0], *batch), flat(second[0], *batch), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


# --- on every engine


METHOD = "fedavg(epochs=1, batch_size=8) | dkd(steps=2, batch_size=8)"


def rows(engine: str, **options: Any) -> list[dict[str, Any]]:
    data = clients((12, 20, 33, 2))
    settings = {
        "method": METHOD,
        "rounds": 2,
        "seed": 3,
        "dtype": "float64",
        "validation": data[1],
        **options,
    }
    return simulate(
        model=network(), clients=data, test=pooled(data), engine=engine, **settings
    ).history


@pytest.mark.parametrize("evaluation", ["global", "client_mean", "client_pooled"])
def test_every_engine_measures_the_same(evaluation: str) -> None:
    serial, batched, pool = (
        rows(engine, metrics=ALL, evaluation=evaluation) for engine in ("serial", "batched", "pool")
    )
    for row, *others in zip(serial, batched, pool, strict=True):
        for other in others:
            assert list(row) == list(other)
            for key, kept in row.items():
                assert other[key] == pytest.approx(kept, rel=1e-9, nan_ok=True), key


def test_a_row_has_the_metrics_asked_for_in_their_order_and_no_number_changes() -> None:
    usual = rows("serial")
    asked = rows("serial", metrics=["macro_f1", "accuracy"], evaluation="client_mean")
    names = [key for key in asked[0] if key.startswith("test_")]
    assert names == [
        "test_macro_f1",
        "test_accuracy",
        "test_client_macro_f1",
        "test_client_accuracy",
    ]
    assert "average_test_macro_f1" in asked[0]
    assert "validation_macro_f1" in asked[0]
    same = rows("serial", metrics=["macro_f1", "accuracy"])
    for before, after in zip(usual, same, strict=True):
        shared = before.keys() & after.keys()
        assert {key: before[key] for key in shared} == {key: after[key] for key in shared}
        assert {"test_accuracy", "bytes_up", "average_validation_accuracy"} <= shared


def test_the_mean_over_clients_leaves_out_those_without_a_value() -> None:
    """Clients have no test set here, but all are judged on the whole one: nothing is left out."""
    row = rows("serial", metrics=["auc"], evaluation="client_mean")[-1]
    assert row["test_auc"] == pytest.approx(np.nanmean(row["test_client_auc"]))


def test_a_bad_loss_is_noticed_also_if_no_row_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts: list[list[bool]] = []

    def noting(turns: Sequence[Turn]) -> list[bool]:
        verdicts.append(_good(turns))
        return verdicts[-1]

    monkeypatch.setattr("feddkd.rounds.loop._good", noting)
    for metrics in (None, ["macro_f1"]):
        for lr in ("0.1", "1e200"):  # the weights stay finite, the logits do not
            method = f"fedavg(epochs=1, batch_size=100, lr={lr})"
            rows("serial", method=method, rounds=1, metrics=metrics)
    assert verdicts == [[True], [False], [True], [False]]


def test_engines_see_the_same_phase_in_every_round() -> None:
    assert judging("test", DEFAULT, ONE_OF_TWO) is judging("test", DEFAULT, ONE_OF_TWO)


# --- names


@pytest.mark.parametrize(
    "asked",
    [
        ["nope"],
        "accuracy",
        [],
        ["auc", "auc"],
        3,
        [3],
        [Metric("loss", "my loss", ACCURACY.sums, ACCURACY.value)],
    ],
)
def test_wrong_names_are_refused(asked: Any) -> None:
    with pytest.raises(InputError, match="metric"):
        find_metrics(asked)
    with pytest.raises(InputError, match="metric"):
        Experiment("fedavg()", metrics=asked)


@pytest.mark.parametrize("name", ["accuracy", "client_f1", "Top 5", ""])
def test_a_metric_needs_a_name_of_its_own(name: str) -> None:
    with pytest.raises(InputError, match="metric"):
        add(Metric(name, name, ACCURACY.sums, ACCURACY.value))
    with pytest.raises(InputError, match="metric"):
        find_metrics([Metric(name, name, ACCURACY.sums, ACCURACY.value)])


def test_a_metric_whose_value_cannot_be_computed_is_refused_before_the_first_round() -> None:
    wrong = Metric("wrong", "wrong", _top_two, lambda sums: sums["hits"])
    with pytest.raises(InputError, match=r"'wrong'.*no 'hits'"):
        rows("serial", metrics=[wrong])


def test_a_metric_may_be_given_as_a_value() -> None:
    top = Metric("top", "top-2", _top_two, ACCURACY.value)
    row = rows("serial", metrics=[top, "accuracy"])[-1]
    assert row["test_accuracy"] <= row["test_top"] <= 1


def _top_two(logits: Tensor, batch: Batch) -> dict[str, Tensor]:
    present = (batch.share > 0).double()
    hits = (logits.topk(2).indices == batch.y.unsqueeze(-1)).any(-1)
    return {"correct": (hits * present).sum(), "count": present.sum()}


def test_metrics_are_no_part_of_an_experiments_digest() -> None:
    plain, asked = Experiment("fedavg()"), Experiment("fedavg()", metrics=["auc", "loss"])
    assert (plain.digest, plain.family) == (asked.digest, asked.family)
    assert asked.as_dict()["metrics"] == ("auc", "loss")
    assert "metrics" not in plain.as_dict()
    assert Experiment(**json.loads(json.dumps(asked.as_dict()))) == asked


# --- in records and reports


TOML = """
method = "fedavg(epochs=1, batch_size=32) | dkd(steps=1)"
model = "mlp(hidden='8')"
clients = 3
rounds = 2
metrics = ["macro_f1", "auc"]
target = 0.01
[sweep]
seed = [0, 1]
"""


@pytest.fixture
def ran(feddkd: Feddkd) -> Feddkd:
    """Return the command line, in a folder with the records of two seeds."""
    Path("asked.toml").write_text(TOML, encoding="utf-8")
    done = feddkd("run", "asked.toml", "--engine", "serial", "--json")
    assert done.status == 0, done.err
    for summary in json.loads(done.out)["runs"]:
        assert 0 < summary["test_macro_f1"] <= 1
        assert 0 < summary["final_test_auc"] <= 1
        assert summary["to_target"]["round"] == 1
    return feddkd


def test_reports_show_the_metrics_that_were_asked_for(ran: Feddkd) -> None:
    records = find(Path("runs"))
    best = [max(r.history, key=lambda row: row["validation_macro_f1"]) for r in records]
    mean = 100 * np.mean([row["test_macro_f1"] for row in best])
    headings, (line,) = grid(records)
    assert headings == ["method", "best", "last", "average", "AUC", *TARGET]
    assert line[1].startswith(f"{mean:.2f}±")
    (told,) = as_json(records)["methods"]
    assert told["test_macro_f1"]["best"]["mean"] == pytest.approx(mean / 100)
    auc = np.mean([row["test_auc"] for row in best])
    assert told["test_auc"]["best"]["mean"] == pytest.approx(auc)
    done = ran("report", "runs", "--out", "page.html", "--figures", "drawn", "--figure", "one.svg")
    assert done.status == 0, done.err
    assert "Test macro-F1 in %" in done.out
    assert "AUC" in done.out
    assert "macro-F1" in Path("page.html").read_text(encoding="utf-8")
    assert {"macro-f1-round.svg", "auc-round.svg"} <= {
        path.name for path in Path("drawn").iterdir()
    }
    assert "AUC" in Path("drawn/table.md").read_text(encoding="utf-8")
    found = figures(records)
    assert list(found["metrics"]) == ["macro_f1", "auc"]
    assert list(found["methods"][0]["metrics"]) == ["macro_f1", "auc"]


TARGET = ["hit", "rounds", "comms", "steps", "MB"]


def test_ls_and_compare_show_the_headline(ran: Feddkd) -> None:
    (first, second) = find(Path("runs"))
    entries = json.loads(ran("ls", "runs", "--json").out)["runs"]
    assert [entry["best"] for entry in entries] == [
        summarise(record.history)["test_macro_f1"] for record in (first, second)
    ]
    assert f"{100 * entries[0]['best']:.2f}" in ran("ls", "runs").out
    told = json.loads(ran("compare", "runs", "runs", "--json").out)
    assert list(told["results"][0]) == ["best", "last", "average", "AUC"]
    assert told["difference"]["AUC"]["difference"]["mean"] == 0


def test_a_run_that_was_stopped_refuses_other_metrics(tmp_path: Path) -> None:
    asked = Experiment("fedavg(epochs=1)", clients=2, rounds=2, metrics=["auc", "loss"])
    execute([asked], out=tmp_path, engine="serial", until=1)
    with pytest.raises(InputError, match="metrics"):
        execute([replace(asked, metrics=None)], out=tmp_path, engine="serial")
    (summary,) = execute([asked], out=tmp_path, engine="serial")
    assert 0 < summary["test_auc"] <= 1


def test_a_metric_that_should_be_low_is_best_where_it_is_lowest(tmp_path: Path) -> None:
    make(tmp_path, methods=2, seeds=3, rounds=5)
    records = find(tmp_path)
    for record in records:
        for row in record.history:
            losses = {"test_loss": row["test_loss"], "validation_loss": row["test_loss"]}
            kept = {key: value for key, value in row.items() if "accuracy" not in key}
            row.clear()
            row.update({**kept, **losses})
    assert headline(records[0].history).name == "loss"
    for record in records:
        lowest = min(row["test_loss"] for row in record.history)
        assert summarise(record.history)["test_loss"] == lowest
    means = {
        record.label: np.mean(
            [summarise(r.history)["test_loss"] for r in records if r.label == record.label]
        )
        for record in records
    }
    (verdict,) = verdicts(ranked(records))
    assert verdict.lead.group[0].label == min(means, key=lambda label: means[label])
    assert verdict.certainty.startswith("Lower in")
    assert f"{min(means.values()):.4f}" in verdict.sentence
    assert write_page(records)


def test_families_with_other_metrics_share_a_table(tmp_path: Path) -> None:
    make(tmp_path, methods=2, seeds=2, rounds=3)
    records = find(tmp_path)
    for record in records:
        if "dkd" in record.label:
            for row in record.history:
                row["test_auc"] = None if record.manifest["canonical"]["seed"] else 0.75
    headings, lines = grid(records)
    column = headings.index("AUC")
    assert sorted(line[column] for line in lines) == ["-", "75.00±0.00"]
    assert write_page(records)
