"""Every method against an independent computation in plain PyTorch, float64, two
rounds, 1e-10.

Clients are of unequal size, only some are active in a round, batches are partial at the end of an
epoch.
"""

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from feddkd import simulate
from feddkd.data.batches import Reads
from plain import Plain, fedmax_code, fedmax_paper, proximal_mean, proximal_sum

# with batches of four each epoch ends in a batch of two: batch norm cannot train on one
SIZES = (10, 14, 22, 18)
SGD, ADAM = torch.optim.SGD, torch.optim.Adam
ADAMW, ADAGRAD, RMSPROP = torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop


def clients(seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(n, 1, 4, 4, generator=draw, dtype=torch.float64) + k,
            torch.randint(0, 3, (n,), generator=draw),
        )
        for k, n in enumerate(SIZES)
    ]


def network(kind: str) -> nn.Module:
    torch.manual_seed(1)
    # a bias before batch norm has no gradient but rounding errors, which Adam would blow up: leave
    # it out
    norm = kind == "bn"
    conv, full = nn.Conv2d(1, 3, 3, padding=1, bias=not norm), nn.Linear(48, 6, bias=not norm)
    first, second = ([nn.BatchNorm2d(3)], [nn.BatchNorm1d(6)]) if norm else ([], [])
    net = nn.Sequential(
        conv, *first, nn.ReLU(), nn.Flatten(), full, *second, nn.ReLU(), nn.Linear(6, 3)
    )
    return net.double()


def is_norm(net: nn.Module, name: str) -> bool:
    return isinstance(net.get_submodule(name.rpartition(".")[0]), nn.BatchNorm1d | nn.BatchNorm2d)


def is_statistic(net: nn.Module, name: str) -> bool:
    return is_norm(net, name) and not name.endswith(("weight", "bias"))


EPOCHS = Reads(4, epochs=2)
LOCAL = "epochs=2, batch_size=4"
DKD = {"steps": 3, "batch_size": 5, "lr": 0.3, "lr_decay": 0.5, "lr_step_decay": 0.7}
DKD_TEXT = "dkd(steps=3, batch_size=5, lr=0.3, lr_decay=0.5, lr_step_decay=0.7{})"
NESTEROV = partial(SGD, momentum=0.9, nesterov=True, weight_decay=0.01)


def half_cosine(t: int) -> float:
    """cosine(over=4, end=0.2)"""
    return 0.2 + 0.8 * (1 + math.cos(math.pi * (t - 1) / 4)) / 2


def warm_line(j: int) -> float:
    """linear(over=7, warmup=2)"""
    return j / 3 if j <= 2 else max(0.0, 1 - (j - 3) / 5)


CASES: list[tuple[str, str, dict[str, Any]]] = [
    (
        f"fedavg({LOCAL}, lr=0.01, optimiser='adamw', weight_decay=0.1, eps=0.001)",
        "bn",
        {"optimiser": partial(ADAMW, weight_decay=0.1, eps=0.001), "lr": 0.01},
    ),
    (
        f"fedavg({LOCAL}, lr=0.01, optimiser='adagrad', eps=0.001)",
        "plain",
        {"optimiser": partial(ADAGRAD, eps=0.001), "lr": 0.01},
    ),
    (
        f"fedavg({LOCAL}, lr=0.01, optimiser='rmsprop', beta2=0.9, momentum=0.5, eps=0.001)",
        "plain",
        {"optimiser": partial(RMSPROP, alpha=0.9, momentum=0.5, eps=0.001), "lr": 0.01},
    ),
    (
        f"fedavg({LOCAL}, lr=0.05, momentum=0.9, max_gradient_norm=0.5)",
        "plain",
        {"optimiser": partial(SGD, momentum=0.9), "lr": 0.05, "max_norm": 0.5},
    ),
    (
        f"fedavg({LOCAL}, lr=0.05, lr_schedule='cosine(over=4, end=0.2)')",
        "plain",
        {"optimiser": SGD, "lr": 0.05, "by_round": half_cosine},
    ),
    (
        f"fedavg({LOCAL}, lr=0.05, momentum=0.9, lr_step_schedule='linear(over=7, warmup=2)')",
        "plain",
        {"optimiser": partial(SGD, momentum=0.9), "lr": 0.05, "by_step": warm_line},
    ),
    (
        f"fedavg({LOCAL}, lr=0.05) | dkd(steps=3, batch_size=5, lr=0.3,"
        " lr_schedule='cosine(over=4, end=0.2)', lr_step_schedule='linear(over=7, warmup=2)')",
        "plain",
        {
            "optimiser": SGD,
            "lr": 0.05,
            "dkd": {
                "steps": 3,
                "batch_size": 5,
                "lr": 0.3,
                "by_round": half_cosine,
                "by_step": warm_line,
            },
        },
    ),
    (f"fedavg({LOCAL}, lr=0.05)", "plain", {"optimiser": SGD, "lr": 0.05}),
    (f"fedavg({LOCAL}, lr=0.05)", "bn", {"optimiser": SGD, "lr": 0.05}),
    (
        "fedavg(steps=5, batch_size=4, lr=0.05)",
        "plain",
        {"optimiser": SGD, "lr": 0.05, "reads": Reads(4, steps=5)},
    ),
    (
        f"fedavg({LOCAL}, lr=0.05, drop_last=True)",
        "bn",
        {"optimiser": SGD, "lr": 0.05, "reads": Reads(4, 2, drop_last=True)},
    ),
    (
        f"fedavg({LOCAL}, lr=0.05, lr_decay=0.5, momentum=0.9)",
        "plain",
        {"optimiser": partial(SGD, momentum=0.9), "lr": 0.05, "lr_decay": 0.5},
    ),
    (
        f"fedavg({LOCAL}, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)",
        "bn",
        {"optimiser": NESTEROV, "lr": 0.05},
    ),
    (
        f"fedavg({LOCAL}, lr=0.01, optimiser='adam', weight_decay=0.01)",
        "plain",
        {"optimiser": partial(ADAM, weight_decay=0.01), "lr": 0.01},
    ),
    (
        f"fedavg({LOCAL}, lr=0.01, optimiser='adam', amsgrad=True, beta1=0.8, beta2=0.95)",
        "bn",
        {"optimiser": partial(ADAM, amsgrad=True, betas=(0.8, 0.95)), "lr": 0.01},
    ),
    (
        f"fedprox({LOCAL}, lr=0.05, mu=2)",
        "plain",
        {"optimiser": SGD, "lr": 0.05, "extra": proximal_sum(2)},
    ),
    (
        f"fedprox({LOCAL}, lr=0.05, mu=10, form='mean')",
        "bn",
        {"optimiser": SGD, "lr": 0.05, "extra": proximal_mean(10)},
    ),
    (
        f"fedmax({LOCAL}, lr=0.05, beta=10)",
        "plain",
        {"optimiser": SGD, "lr": 0.05, "extra": fedmax_code(10)},
    ),
    (
        f"fedmax({LOCAL}, lr=0.05, beta=2, reduction='batchmean', reverse=True)",
        "bn",
        {"optimiser": SGD, "lr": 0.05, "extra": fedmax_paper(2)},
    ),
    (f"fedbn({LOCAL}, lr=0.05)", "bn", {"optimiser": SGD, "lr": 0.05, "private": is_norm}),
    (
        f"fedavg({LOCAL}, lr=0.05) | " + DKD_TEXT.format(""),
        "plain",
        {"optimiser": SGD, "lr": 0.05, "dkd": DKD},
    ),
    (
        f"fedavg({LOCAL}, lr=0.05) | " + DKD_TEXT.format(""),
        "bn",
        {"optimiser": SGD, "lr": 0.05, "dkd": DKD},
    ),
    (
        f"fedavg({LOCAL}, lr=0.05) | " + DKD_TEXT.format(", student='batch'"),
        "bn",
        {"optimiser": SGD, "lr": 0.05, "dkd": {**DKD, "student": "batch"}},
    ),
    (
        f"fedavg({LOCAL}, lr=0.05) | " + DKD_TEXT.format(", warmup=1"),
        "plain",
        {"optimiser": SGD, "lr": 0.05, "dkd": {**DKD, "warmup": 1}},
    ),
    (
        f"fedprox({LOCAL}, lr=0.05, mu=2) | " + DKD_TEXT.format(""),
        "plain",
        {"optimiser": SGD, "lr": 0.05, "extra": proximal_sum(2), "dkd": DKD},
    ),
    (
        f"fedmax({LOCAL}, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01, beta=10) | "
        + DKD_TEXT.format(""),
        "plain",
        {"optimiser": NESTEROV, "lr": 0.05, "extra": fedmax_code(10), "dkd": DKD},
    ),
    (
        f"fedbn({LOCAL}, lr=0.05) | " + DKD_TEXT.format(""),
        "bn",
        {"optimiser": SGD, "lr": 0.05, "private": is_norm, "dkd": DKD},
    ),
    (
        f"fedbn({LOCAL}, lr=0.01, optimiser='adam') | " + DKD_TEXT.format(""),
        "bn",
        {"optimiser": ADAM, "lr": 0.01, "private": is_norm, "dkd": DKD},
    ),
    (
        f"fedbn({LOCAL}, lr=0.05, private='statistics') | " + DKD_TEXT.format(", student='batch'"),
        "bn",
        {"optimiser": SGD, "lr": 0.05, "private": is_statistic, "dkd": {**DKD, "student": "batch"}},
    ),
]


@pytest.mark.parametrize(("text", "kind", "settings"), CASES)
@pytest.mark.parametrize("cohort", [3, 4])
def test_two_rounds_equal_the_plain_computation(
    text: str, kind: str, settings: dict[str, Any], cohort: int
) -> None:
    start, data, seed = network(kind), clients(), 5
    settings = {"reads": EPOCHS, **settings}
    if "private" in settings:
        settings["private"] = partial(settings["private"], start)
    plain = Plain(copy.deepcopy(start), data, seed, **settings)
    plain.run(rounds=2, cohort=cohort)
    test = (torch.cat([x for x, _ in data]), torch.cat([y for _, y in data]))
    result = simulate(
        model=start,
        clients=data,
        test=test,
        method=text,
        rounds=2,
        cohort=cohort,
        seed=seed,
        initial=start.state_dict(),
        dtype=torch.float64,
    )
    expected = {
        name: tensor for name, tensor in plain.net.state_dict().items() if not plain.private(name)
    }
    assert set(result.params) == set(expected)
    for name, tensor in expected.items():
        assert torch.allclose(result.params[name], tensor, rtol=0, atol=1e-10), name
    accuracies = [_accuracy(plain.client_view(k), *test) for k in range(len(data))]
    assert result.history[-1]["test_accuracy"] == pytest.approx(sum(accuracies) / len(accuracies))
    # something was learnt
    assert any(
        not torch.equal(tensor, start.state_dict()[name]) for name, tensor in expected.items()
    )


def _accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    return float((net.eval()(x).argmax(1) == y).double().mean())


@pytest.mark.long
def test_the_plain_computation_is_sensitive_to_what_it_should_tell_apart() -> None:
    """Else agreement would mean little: each of these pairs must differ by far more than the
    tolerance.
    """
    texts = [text for text, kind, _ in CASES if kind == "plain"]
    start, data = network("plain"), clients()
    ends = [
        simulate(
            model=start,
            clients=data,
            test=data[0],
            method=text,
            rounds=2,
            cohort=3,
            seed=5,
            initial=start.state_dict(),
            dtype=torch.float64,
        ).params["3.weight"]
        for text in texts
    ]
    for i, first in enumerate(ends):
        for second in ends[i + 1 :]:
            assert (first - second).abs().max() > 1e-6
