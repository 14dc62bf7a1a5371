"""Metrics of all predictions at once, such as torchmetrics objects."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from feddkd import InputError, Result, simulate
from small import clients, network, pooled

DATA = clients()


class MeanMargin:
    """An object as torchmetrics has them: the median distance between the two largest logits."""

    higher_is_better = False

    def reset(self) -> None:
        self.seen: list[Tensor] = []

    def update(self, output: Tensor, target: Tensor) -> None:
        if len(output) != len(target):
            raise ValueError("not alike")
        self.seen.append(output)

    def compute(self) -> Tensor:
        top = torch.cat(self.seen).topk(2).values
        return (top[:, 0] - top[:, 1]).median()


def run(engine: str = "serial", **options: Any) -> Result:
    return simulate(
        model=network(),
        clients=DATA,
        test=pooled(DATA),
        validation=DATA[1],
        rounds=2,
        engine=engine,
        progress=False,
        **{"method": "fedavg(epochs=1, lr=0.1) | dkd(steps=1)", **options},
    )


@pytest.mark.parametrize("engine", ["serial", "batched", "pool"])
def test_an_object_gets_all_predictions_of_a_set(engine: str) -> None:
    result = run(engine, metrics=[MeanMargin(), "accuracy"])
    x, y = pooled(DATA)
    net = network()
    net.load_state_dict(result.state_dict())
    exact = MeanMargin()
    exact.reset()
    exact.update(net(x).detach(), y)
    row = result.history[-1]
    assert row["test_mean_margin"] == pytest.approx(float(exact.compute()), rel=1e-9)
    assert {"average_test_mean_margin", "validation_mean_margin", "test_accuracy"} <= set(row)
    best = min(result.history, key=lambda row: row["validation_mean_margin"])
    assert result.summary["best_round"] == best["round"]


def test_predictions_of_single_clients_are_not_kept() -> None:
    with pytest.raises(InputError, match=r"mean_margin.*evaluation='global'"):
        run(metrics=[MeanMargin()], method="local_only(epochs=1)")


def test_an_object_that_cannot_compute_is_named() -> None:
    class Wrong(MeanMargin):
        def compute(self) -> Tensor:
            raise ValueError("three classes")

    with pytest.raises(InputError, match=r"Wrong cannot be computed.*three classes"):
        run(metrics=[Wrong()])


class Distance(MeanMargin):
    def update(self, output: Tensor, target: Tensor) -> None:
        assert output.shape == target.shape
        self.sums = (output - target).abs().mean()

    def compute(self) -> Tensor:
        return self.sums


def test_one_number_of_each_example_has_the_shape_of_its_target() -> None:
    x = torch.linspace(-1, 1, 12).reshape(6, 2)
    metrics: list[Any] = [Distance(), "mae"]
    row = simulate(
        model=nn.Linear(2, 1),
        clients=[(x, x[:, 0])],
        test=(x, x[:, 1]),
        task="regression",
        method="fedavg(epochs=1)",
        metrics=metrics,
        progress=False,
    ).history[0]
    assert row["test_distance"] == pytest.approx(row["test_mae"], rel=1e-6)


def test_a_class_in_place_of_an_object_is_named() -> None:
    with pytest.raises(InputError, match=r"MeanMargin\(\.\.\.\)"):
        run(metrics=[MeanMargin])


def test_torchmetrics_agree_with_ours() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    kinds = torchmetrics.classification
    theirs = [kinds.MulticlassAccuracy(3, average="micro"), kinds.MulticlassAUROC(3)]
    row = run(metrics=[*theirs, "accuracy", "auc"]).history[-1]
    assert row["test_multiclass_accuracy"] == pytest.approx(row["test_accuracy"])
    assert row["test_multiclass_auroc"] == pytest.approx(row["test_auc"], abs=5e-3)
