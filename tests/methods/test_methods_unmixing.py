"""Mix2FLD, whose server learns from unmixed examples: against plain PyTorch, by its laws."""

from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from feddkd import InputError
from feddkd.errors import RunError
from plain_comparison import compare_rounds
from plain_unmixing import Mix2FLD
from small import clients, network, run
from test_reference import DKD, DKD_TEXT

DATA, NET = clients(), network()
MODULE = import_module("feddkd.methods.mix2fld")
L = "epochs=2, batch_size=4, lr=0.05"
S = "server_steps=5, server_batch_size=6, server_lr=0.1"
SERVER = {"server_steps": 5, "server_size": 6, "server_lr": 0.1}


class InOrder:
    """Stands for a random generator: the pairs in their order."""

    def permutation(self, n: int) -> Any:
        return np.arange(n)


@pytest.mark.parametrize(
    ("text", "settings", "kind", "unmixed"),
    [
        (f"mix2fld({L}, {S}, beta=0.5)", {"beta": 0.5}, "plain", True),
        (f"mix2fld({L}, {S}, samples=9, lam=0.3)", {"samples": 9, "lam": 0.3}, "bn", True),
        (f"mix2fld({L}, {S}, mixed=1, beta=2)", {"mixed": 1, "beta": 2}, "plain", False),
        (f"mix2fld({L}, {S}) | {DKD_TEXT.format('')}", {"dkd": DKD}, "plain", True),
    ],
)
def test_three_rounds_equal_the_plain_computation(
    text: str,
    settings: dict[str, Any],
    kind: str,
    unmixed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MODULE, "generator", lambda key: InOrder())
    plain: Any = compare_rounds(text, Mix2FLD, {**SERVER, **settings}, kind)
    assert plain.unmixed == unmixed


def test_two_clients_mixed_examples_of_the_same_two_give_them_back() -> None:
    a, b = torch.randn(2, 5, dtype=torch.float64)
    table = {
        "x": torch.stack([0.1 * a + 0.9 * b, 0.1 * b + 0.9 * a]),
        "first": torch.tensor([0, 2]),
        "second": torch.tensor([2, 0]),
        "client": torch.tensor([4, 1]),
    }
    found = MODULE.unmixed(table, 0.1)
    assert torch.allclose(found["x"], torch.stack([a, b]), atol=1e-12)
    assert found["y"].tolist() == [0, 2]
    assert found["weight"].tolist() == [1, 1]
    alone = MODULE.unmixed({**table, "client": torch.tensor([4, 4])}, 0.1)  # of one client: as sent
    assert torch.equal(alone["x"], table["x"])
    assert alone["weight"].tolist() == [0.1, 0.1]


def test_examples_go_up_once_then_outputs_and_never_weights() -> None:
    first, second = run(f"mix2fld({L}, {S}, mixed=2)", DATA, NET).history
    outputs, mixed = (3 * 3 + 3) * 8, 2 * (5 * 8 + 8 + 8 + 1)
    model = sum(parameter.numel() for parameter in NET.parameters())
    assert first["bytes_up"] == 3 * (outputs + mixed)
    assert second["bytes_up"] - first["bytes_up"] == 3 * outputs
    assert first["bytes_down"] == 3 * 8 * (model + 1)  # and the rate
    assert first["communications"] == second["communications"] - first["communications"] + 1


def test_clients_of_one_label_each_have_nothing_to_mix() -> None:
    data = [(x, torch.full_like(y, k)) for k, (x, y) in enumerate(DATA)]
    with pytest.raises(RunError, match="mix2fld"):
        run(f"mix2fld({L}, {S})", data, NET)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"mix2fld({L}, lam=0.5)", "lam"),
        (f"mix2fld({L}) | private(names='0.*')", "private to clients"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        run(text, DATA, NET)


def test_tokens_cannot_be_mixed() -> None:
    data = [(torch.randint(0, 9, (len(y), 4)), y) for _, y in DATA]
    net = nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(8, 3)).double()
    with pytest.raises(InputError, match="mix2fld mixes"):
        run(f"mix2fld({L}, {S})", data, net)
