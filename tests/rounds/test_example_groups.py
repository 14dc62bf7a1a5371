"""Metrics of groups of test examples are those of a computation on each group alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import feddkd
from feddkd import Experiment, InputError, Result, simulate
from feddkd.data.examples import Examples, from_arrays
from feddkd.reports.tables import grid
from feddkd.runs.loggers import numbers
from feddkd.runs.record import find
from small import clients, distance, network, pooled

DATA = clients(sizes=(10, 12, 14, 16))
TESTS = clients(sizes=(9, 7, 8, 6), seed=5)
NAMES = [["b", "a", "b"] * 3, ["b"] * 7, ["a", "a", "b", "c"] * 2, ["a"] * 6]
LOCAL = "epochs=1, batch_size=8, lr=0.1"


def run(**options: Any) -> Result:
    settings = {"model": network(), "method": f"fedavg({LOCAL})", "engine": "serial", **options}
    return simulate(clients=DATA, rounds=2, progress=False, **settings)


def logits_of(result: Result, x: torch.Tensor, client: int | None = None) -> Any:
    """Return the logits of the network of `small`, computed in numpy."""
    w = {name: tensor.numpy() for name, tensor in result.state_dict(client).items()}
    hidden = np.maximum(x.numpy() @ w["0.weight"].T + w["0.bias"], 0)
    return hidden @ w["2.weight"].T + w["2.bias"]


def scores(logits: Any, y: torch.Tensor) -> tuple[float, float]:
    """Return accuracy and log loss."""
    shifted = logits - logits.max(1, keepdims=True)
    surprise = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(y)), y.numpy()]
    return float((logits.argmax(1) == y.numpy()).mean()), float(surprise.mean())


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_the_global_model_is_measured_on_each_group(engine: str) -> None:
    x, y = pooled(TESTS)
    groups = np.array([2, 10, 10] * 10)
    metrics = ["accuracy", "log_loss"]
    result = run(test=(x, y), groups=groups, metrics=metrics, engine=engine)
    row = result.history[-1]
    logits = logits_of(result, x)
    wanted = {
        name: scores(logits[groups == int(name)], y[groups == int(name)]) for name in ("2", "10")
    }
    assert list(row["test_accuracy_by_group"]) == ["2", "10"]
    for name, (accuracy, log_loss) in wanted.items():
        assert row["test_accuracy_by_group"][name] == pytest.approx(accuracy, abs=1e-12)
        assert row["test_log_loss_by_group"][name] == pytest.approx(log_loss, abs=1e-12)


def test_the_models_of_clients_are_measured_on_each_group_of_their_own_tests() -> None:
    result = run(method=f"local_only({LOCAL})", client_tests=TESTS, groups=NAMES)
    row, each = result.history[-1], dict[str, list[float | None]]()
    for name in ("a", "b", "c"):
        each[name] = []
        for k, (x, y) in enumerate(TESTS):
            those = np.array(NAMES[k]) == name
            accuracy = scores(logits_of(result, x, k)[those], y[those])[0] if any(those) else None
            each[name].append(accuracy)
    assert row["test_client_accuracy_by_group"] == each
    assert each["b"][3] is None
    assert each["c"].count(None) == 3
    for name, values in each.items():
        known = [value for value in values if value is not None]
        assert row["test_accuracy_by_group"][name] == pytest.approx(np.mean(known), abs=1e-12)


def test_clients_that_train_before_they_are_judged_are_measured_by_group_afterwards() -> None:
    method = f"fedavg({LOCAL}) | fine_tune({LOCAL})"
    options: dict[str, Any] = {"method": method, "client_tests": TESTS, "diagnostics": True}
    one_group = [["all"] * len(y) for _, y in TESTS]
    for row in run(**options, groups=one_group).history:
        assert row["test_accuracy_by_group"] == {"all": row["test_accuracy"]}
        assert row["test_client_accuracy_by_group"]["all"] == row["test_client_accuracy"]


def test_groups_change_no_other_number_of_a_run() -> None:
    options: dict[str, Any] = {"client_tests": TESTS, "evaluate_every": 2, "evaluate_clients": 2}
    with_groups, without = run(**options, groups=NAMES), run(**options)
    assert distance(with_groups.params, without.params) == 0
    for row, other in zip(with_groups.history, without.history, strict=True):
        assert {key: row[key] for key in row if not key.endswith("_by_group")} == other
    judged = [k for k, v in enumerate(without.history[0]["test_client_accuracy"]) if v is not None]
    by_group = with_groups.history[0]["test_client_accuracy_by_group"]
    assert set(by_group) == {name for k in judged for name in NAMES[k]}


def test_regression_and_all_predictions_at_once_have_groups() -> None:
    class Worst:
        higher_is_better = False

        def reset(self) -> None:
            self.value = 0.0

        def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
            assert output.shape == target.shape
            self.value = float((output - target).abs().max())

        def compute(self) -> float:
            return self.value

    draw = np.random.default_rng(0)
    parts = [(draw.normal(size=(n, 5)), draw.normal(size=n)) for n in (9, 12, 10)]
    x, y = parts[2]
    groups, metrics = np.array(["old", "young"] * 5), list[Any](["rmse", Worst()])
    result = simulate(
        model=nn.Linear(5, 1).double(),
        clients=parts[:2],
        test=(x, y),
        groups=groups,
        task="regression",
        metrics=metrics,
        method=f"fedavg({LOCAL})",
        progress=False,
    )
    w = {name: tensor.numpy() for name, tensor in result.state_dict().items()}
    error = (x @ w["weight"].T + w["bias"])[:, 0] - y
    for name in ("old", "young"):
        those = error[groups == name]
        row = result.history[0]
        rmse = np.sqrt(np.square(those).mean())
        assert row["test_rmse_by_group"][name] == pytest.approx(rmse, abs=1e-12)
        assert row["test_worst_by_group"][name] == pytest.approx(abs(those).max(), abs=1e-12)


def test_a_column_of_a_table_names_the_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [f"{i % 7},{i * i % 11},{'mf'[i % 3 > 0]},{'yn'[i % 7 > 3]}" for i in range(120)]
    Path("t.csv").write_text("\n".join(["a,b,sex,ill", *lines]) + "\n")
    experiment = Experiment(
        method="fedavg(epochs=1)",
        data="table(path='t.csv', y='ill', group='sex')",
        model="mlp(hidden='4')",
        partition="iid()",
        clients=3,
        rounds=1,
    )
    (record,) = feddkd.run(experiment, "out", engine="serial")
    (row,), summary = record.history, record.summary
    values = row["test_accuracy_by_group"]
    assert set(values) == {"m", "f"}
    assert summary["groups"]["accuracy"] == values
    assert numbers(row)["test_accuracy_by_group/m"] == values["m"]
    headings, (line,) = grid(find(Path("out")))
    assert line[headings.index("worst group")].startswith(f"{100 * min(values.values()):.2f}")
    same = Experiment(
        **{**experiment.as_dict(), "data": "table(path='t.csv', x='a,b', y='ill', group=None)"}
    )
    assert "group" not in same.canonical["data"]
    (other,) = feddkd.run(same, "other", engine="serial")
    assert other.history[0]["test_accuracy"] == row["test_accuracy"]


def test_rows_of_tables_keep_their_groups_when_they_are_divided() -> None:
    sexes = ["mmf"[row % 3] for row in range(40)]
    table = {"a": list(range(40)), "sex": sexes, "ill": [row % 2 for row in range(40)]}
    data = feddkd.from_table(table, y="ill", group="sex", standardise=False)
    federation = feddkd.divide(data, "iid()", clients=3, client_tests="own")
    assert federation.groups is not None
    assert federation.groups.tolist() == [sexes[int(a)] for a in federation.x[:, 0]]
    texts = {"text": ["abc" * 9, "de" * 7, "f" * 30], "by": ["x", "y", "x"]}
    lines = feddkd.from_table(texts, x="text", group="by", length=5, test=0.3)
    for part in (lines.train, lines.test):
        assert part.group is not None
        letters = ["".join(lines.labels[i] for i in row if i) for row in part.x.tolist()]
        assert part.group.tolist() == [
            "y" if "d" in each or "e" in each else "x" for each in letters
        ]


def test_data_with_too_few_groups_are_refused() -> None:
    part = Examples(*DATA[0], group=np.array(["a", "b"]))
    with pytest.raises(InputError, match="10 examples need 10 groups"):
        from_arrays(part, part)


@pytest.mark.parametrize(
    ("groups", "part"),
    [
        (3, "groups must be a list"),
        ([["a"]] * 4, "groups has the lengths [1, 1, 1, 1]"),
        (NAMES[:3], "groups has the lengths [9, 7, 8]"),
        ([[""] * len(y) for _, y in TESTS], "no test example"),
    ],
)
def test_wrong_groups_are_refused(groups: Any, part: str) -> None:
    with pytest.raises(InputError) as caught:
        run(client_tests=TESTS, groups=groups)
    assert part in str(caught.value)


def test_a_record_is_not_continued_with_other_groups(tmp_path: Path) -> None:
    def begin(groups: Any) -> Result:
        return run(client_tests=TESTS, groups=groups, out=tmp_path / "run")

    history = begin(NAMES).history
    with pytest.raises(InputError, match="groups"):
        begin([list(reversed(names)) for names in NAMES])
    assert begin(NAMES).history == history
