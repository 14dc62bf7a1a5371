"""A user's mistakes in Python: each ends in one line that names what is wrong and the way out."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import feddkd
from feddkd.errors import InputError

X, Y = torch.linspace(-1, 1, 60).reshape(12, 5), torch.arange(12) % 3
PAIR, DATA_SET = (X, Y), TensorDataset(X, Y)
IMAGES = torch.zeros(12, 8, 8, 3, dtype=torch.uint8)


class Bug(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (len(x) // 0)


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), super().forward(x)


class Predicts(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(1)


def client(x: Any, y: Any = Y) -> dict[str, Any]:
    return {"clients": [(x, y), PAIR]}


# what is wrong -> (arguments of simulate, what the message says)
CLIENTS: dict[str, tuple[dict[str, Any], str]] = {
    "a dict of clients": ({"clients": {"ann": PAIR}}, r"dict: give list\(clients\.values\(\)\)"),
    "one pair": ({"clients": PAIR}, r"\[\(x0, y0\), \(x1, y1\)\]"),
    "one pair as a list": ({"clients": [X, Y]}, r"\[\(x0, y0\), \(x1, y1\)\]"),
    "one tensor": ({"clients": X}, "Tensor; feddkd.divide"),
    "one data set": ({"clients": DATA_SET}, "TensorDataset; feddkd.divide"),
    "a loader": ({"clients": DataLoader(DATA_SET)}, r"DataLoader: give .*loader\.dataset"),
    "a name": ({"clients": "digits"}, "str; feddkd.divide"),
    "a number": ({"clients": 10}, "int; feddkd.divide"),
    "nothing": ({"clients": None}, "clients must be a list .* not NoneType"),
    "a generator": ({"clients": (one for one in [PAIR])}, "not generator"),
    "no client": ({"clients": []}, "at least one client"),
    "a client's loader": ({"clients": [DataLoader(DATA_SET)]}, r"client 0: .*loader\.dataset"),
    "lists of numbers": (client(X.tolist(), Y.tolist()), r"client 0: .*numpy\.array\(x\)"),
    "a list of lists": ({"clients": [X.tolist()]}, "client 0: item 0 .* list"),
    "x alone": ({"clients": [X]}, "client 0: labels are missing"),
    "three parts": ({"clients": [(X, Y, Y)]}, "client 0: .* tuple of 3"),
    "a dict of x and y": ({"clients": [{"x": X, "y": Y}]}, "client 0: .*'x', 'y'.* pair"),
    "a client that is nothing": ({"clients": [PAIR, None]}, "client 1: .*NoneType"),
    "a client that is a path": ({"clients": ["data.csv"]}, "client 0: .*str"),
    "labels that are texts": (client(X, np.array(list("abc" * 4))), "client 0: .*from_table"),
    "labels in a list": (client(X, Y.tolist()), r"client 0: .*numpy\.array\(y\)"),
    "an array of objects": (client(X.numpy().astype(object)), "client 0: .*array of object"),
    "labels with fractions": (client(X, Y + 0.5), r"client 0: labels .* 0\.5"),
    "one-hot labels": (client(X, nn.functional.one_hot(Y, 3)), r"client 0: .*y\.argmax\(1\)"),
    "labels from 1": (client(X, Y + 1), "labels go up to 3, .* returns 3"),
    "negative labels": (client(X, Y - 1), r"client 0: labels .* -1\.\.1"),
    "truth values as labels": (client(X, Y == 0), "client 0: labels .*bool"),
    "channels last": (client(IMAGES), r"client 0: .*channels first; \(12, 8, 8, 3\)"),
    "a number that is none": (client(X * torch.nan), "client 0: .*NaN"),
    "other lengths": (client(X[:5]), r"client 0: 5 examples .* \(12,\)"),
    "other types": (client(X.double()), "torch.float64, others .* torch.float32"),
    "other shapes": (client(X[:, :4]), r"\(4,\) .* others \(5,\)"),
    "no examples": (client(X[:0], Y[:0]), "client 0: .*empty"),
    "complex numbers": (client(X + 0j), "client 0: .*complex"),
    "a sparse tensor": (client(X.to_sparse()), "client 0: .*layout torch.sparse_coo"),
    "a meta tensor": (client(X.to("meta")), "client 0: .*meta device"),
    "no tests": ({"test": None}, "test is missing"),
    "tests of each client": ({"test": [PAIR, PAIR]}, "client_tests takes a list"),
    "tests of too few clients": ({"client_tests": [PAIR]}, "1 parts, and there are 2 clients"),
    "a loader of tests": ({"test": DataLoader(DATA_SET)}, r"test: .*loader\.dataset"),
    "a whole Data": (
        {"clients": feddkd.from_table({"a": [1.0, 2.0] * 4, "y": [0, 1] * 4}, y="y")},
        "feddkd.divide",
    ),
}
NETWORKS: dict[str, tuple[dict[str, Any], str]] = {
    "a name": ({"model": "resnet18"}, "model must be a torch.nn.Module.* str"),
    "nothing": ({"model": None}, "model must be .* NoneType"),
    "a class that needs arguments": ({"model": nn.Linear}, "in_features"),
    "on the meta device": ({"model": nn.Linear(5, 3, device="meta")}, "'weight' .*meta device"),
    "without shapes": ({"model": nn.LazyLinear(3)}, "LazyLinear.* call the network once"),
    "with a bug": ({"model": Bug(5, 3)}, r"by zero \(.*test_mistakes\.py, line \d+\)"),
    "with two outputs": ({"model": Twice(5, 3)}, r"functional\(net, output=0\)"),
    "that predicts": ({"model": Predicts(5, 3)}, "logits .* torch.int64"),
    "of other inputs": ({"model": nn.Linear(4, 3)}, r"cannot read examples of shape \(5,\)"),
    "with too few outputs": ({"model": nn.Linear(5, 2)}, "labels go up to 2, .* returns 2"),
    "without parameters": ({"model": nn.Flatten()}, "must have parameters"),
    "in a wrapper": ({"model": nn.DataParallel(nn.Linear(5, 3))}, r"\.module"),
    "of half precision": ({"model": nn.Linear(5, 3).half()}, "float16.*dtype="),
    "with a batch of one example": (
        {
            "model": nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
            "method": "fedavg(batch_size=11)",
        },
        "one example.*drop_last=True",
    ),
    "whose weights are absent": ({"initial": "absent.pt"}, "absent.pt"),
    "with weights of another": ({"initial": nn.Linear(4, 3)}, r"'weight' .*\(3, 4\).*\(3, 5\)"),
    "with a list as weights": ({"initial": [1, 2]}, "initial must be .* list"),
}
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "a misspelt method": ({"method": "fedvg()"}, r"'fedvg' \(did you mean 'fedavg'\?\)"),
    "a misspelt option": ({"method": "fedavg(epoch=1)"}, r"did you mean 'epochs'\?"),
    "a rate by the paper's name": ({"method": "fedavg() | dkd(gamma=1)"}, "did you mean 'lr'"),
    "the paper's own method": ({"method": "FedDKD()"}, r"did you mean 'fedavg\(\) \| dkd\(\)'"),
    "an option without name": ({"method": "fedavg(5)"}, "key=value, not '5'"),
    "a word for a number": ({"method": "fedavg(lr='a')"}, "lr must be a number, not 'a'"),
    "a negative rate": ({"method": "fedavg(lr=-1)"}, "lr must be > 0"),
    "an open bracket": ({"method": "fedavg(epochs=1"}, r"not of the form name\(key=value"),
    "dkd alone": ({"method": "dkd()"}, r"fedavg\(\) \| dkd\(\)"),
    "a list of methods": ({"method": ["fedavg()"]}, "method must be .* list"),
    "a misspelt optimiser": ({"method": "fedavg(optimizer='adamm')"}, "did you mean 'adam"),
    "no public data": ({"method": "feddf()"}, "public data, and there is none"),
    "no rounds": ({"rounds": 0}, "rounds must be >= 1"),
    "too many in a cohort": ({"cohort": 5}, "5 clients, but there are 2"),
    "several seeds": ({"seed": [0, 1]}, "seed must be a whole number"),
    "a misspelt engine": ({"engine": "batchd"}, r"did you mean 'batched'\?"),
    "an unknown device": ({"device": "abacus"}, "'abacus'"),
    "an unknown type": ({"dtype": "float8"}, "float32, float64"),
    "a misspelt protocol": ({"evaluation": "client"}, r"did you mean 'client_mean'\?"),
    "a misspelt metric": ({"metrics": ["acuracy"]}, r"did you mean 'accuracy'\?"),
    "a metric without list": ({"metrics": "f1"}, r"list of names, as in"),
    "a misspelt task": ({"task": "clasification"}, r"did you mean 'classification'\?"),
    "a task for tokens": ({"task": "language"}, r"language\(\)': it needs logits for each token"),
    "a task for several labels": ({"task": "multilabel"}, r"multilabel\(\)': it needs"),
    "a misspelt availability": ({"availability": "random(dorp=0.1)"}, "did you mean 'drop'"),
    "too many answers wanted": ({"min_clients": 5}, "min_clients is 5"),
    "a misspelt rule": ({"on_divergence": "dropp"}, "did you mean 'drop'"),
    "a number for a function": ({"on_round": 5}, "on_round must be a function"),
    "a number for a folder": ({"out": 5}, "out must be the path"),
    "a delta above 1": ({"delta": 2}, "delta must be > 0 and < 1"),
}
ALL = [
    pytest.param(changes, says, id=f"{kind}: {name}")
    for kind, table in (("clients", CLIENTS), ("network", NETWORKS), ("options", OPTIONS))
    for name, (changes, says) in table.items()
]


def test_there_are_as_many_mistakes_as_were_asked_for() -> None:
    assert len(ALL) >= 84


@pytest.mark.parametrize(("changes", "says"), ALL)
def test_a_mistake_ends_in_one_clear_line(changes: dict[str, Any], says: str) -> None:
    given: dict[str, Any] = {
        "model": nn.Linear(5, 3),
        "clients": [PAIR, PAIR],
        "test": PAIR,
        "method": "fedavg(epochs=1, batch_size=4)",
        "engine": "serial",
        "progress": False,
    }
    with pytest.raises(InputError, match=says) as caught:
        feddkd.simulate(**{**given, **changes})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1_000


@pytest.mark.parametrize(
    ("model", "method", "says"),
    [
        (lambda: nn.Sequential(nn.Linear(5, 3), nn.Softmax(1)), "fedavg()", "softmax"),
        (lambda: nn.Linear(5, 3), "fedbn()", "no"),
    ],
)
def test_what_is_most_likely_a_mistake_is_warned_of(
    model: Callable[[], nn.Module], method: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    given: dict[str, Any] = {"clients": [PAIR], "test": PAIR, "engine": "serial"}
    feddkd.simulate(model=model, method=method, progress=False, **given)
    assert [says in record.getMessage() for record in caplog.records] == [True]


def test_tests_of_each_client_are_its_own() -> None:
    """A client whose tests are wrong in every label has accuracy 0, the other 1."""
    right = 4.0 * nn.functional.one_hot(Y, 3).float()
    result = feddkd.simulate(
        model=nn.Linear(3, 3),
        initial={"weight": torch.eye(3), "bias": torch.zeros(3)},
        clients=[(right, Y), (right, Y)],
        client_tests=[(right, Y), (right[:6], (Y[:6] + 1) % 3)],
        method="fedavg(epochs=1, lr=1e-9)",
        evaluation="client_mean",
        engine="serial",
        progress=False,
    )
    assert result.history[0]["test_accuracy"] == pytest.approx(0.5)
    pooled = feddkd.simulate(
        model=nn.Linear(3, 3),
        initial={"weight": torch.eye(3), "bias": torch.zeros(3)},
        clients=[(right, Y), (right, Y)],
        client_tests=[(right, Y), (right[:6], (Y[:6] + 1) % 3)],
        method="fedavg(epochs=1, lr=1e-9)",
        evaluation="global",
        engine="serial",
        progress=False,
    )
    assert pooled.history[0]["test_accuracy"] == pytest.approx(12 / 18)
