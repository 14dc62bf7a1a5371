"""FedFomo, whose clients move to models that are better on examples kept aside."""

from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

from feddkd import InputError, parse, simulate
from feddkd.data.batches import Reads, draw
from plain_comparison import compare_rounds, images, net_of
from plain_fomo import AlwaysFirst, FedFomo
from small import clients, distance, network, run

DATA, NET = clients((12, 20, 33, 15)), network()
L = "epochs=2, batch_size=4, lr=0.05"


@pytest.mark.parametrize(
    ("text", "settings", "kind"),
    [
        (f"fedfomo({L}, spare=4)", {"spare": 4}, "plain"),
        (f"fedfomo({L}, spare=50, models=2)", {"spare": 50, "models": 2}, "plain"),
        (f"fedfomo({L}, spare=4, models=1)", {"spare": 4, "models": 1}, "bn"),
    ],
)
def test_three_rounds_equal_the_plain_computation(
    text: str, settings: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module("feddkd.methods.fedfomo")
    monkeypatch.setattr(module, "generator", lambda key: AlwaysFirst())
    settings = {**settings, "private": lambda name: True}
    plain: Any = compare_rounds(text, FedFomo, settings, kind)
    start, data = net_of(kind), images()
    result = simulate(
        model=start, clients=data, test=data[0], method=text, rounds=3, cohort=3, seed=5,
        initial=start.state_dict(), dtype=torch.float64,
    )  # fmt: skip
    for k in plain.known:
        own = result.state_dict(client=k)
        for name, tensor in plain.known[k].state_dict().items():
            assert torch.allclose(own[name], tensor, rtol=0, atol=1e-10), (k, name)
    assert any(worth > 0 for worth in plain.worth.values())
    assert settings.get("models") == 1 or any(worth < 0 for worth in plain.worth.values())


@pytest.mark.parametrize("engine", ["batched", "pool"])
def test_every_engine_computes_the_same(engine: str) -> None:
    text = f"fedfomo({L}, spare=4, models=2, exploration=0.5)"
    ends = [run(text, DATA, NET, engine=e, cohort=3, rounds=3) for e in ("serial", engine)]
    for k in range(len(DATA)):
        assert distance(*(end.state_dict(client=k) for end in ends)) < 1e-12


def test_the_same_examples_are_set_aside_in_all_rounds_and_phases() -> None:
    reads = Reads(4, epochs=3, spare=5, lasting=True)
    aside = Reads(4, spare=5, lasting=True, aside=True, random=False)
    first = None
    for t in range(1, 4):
        for phase in range(2):
            key = (3, t, phase, 1, 7)
            (kept,) = draw(aside, 17, key)
            batches = draw(reads, 17, key)
            assert len(kept) == 5
            assert first is None or np.array_equal(kept, first)
            first = kept
            read = np.concatenate(batches)
            assert sorted(set(read)) == sorted(set(range(17)) - set(kept))
            assert [len(batch) for batch in batches] == reads.sizes(17)
            assert len(batches) == reads.count(17) == 9
            assert reads.examples(17) == len(read) == 36


def test_a_client_is_first_alone_and_then_sent_models_of_others() -> None:
    rows = run(f"fedfomo({L}, models=2)", DATA, NET, rounds=2, cohort=4).history
    size = 8 * sum(parameter.numel() for parameter in NET.parameters())
    assert rows[0]["bytes_up"] == 4 * size
    assert rows[1]["bytes_up"] - rows[0]["bytes_up"] == 4 * (size + 2 * 8)
    assert rows[1]["bytes_down"] - rows[0]["bytes_down"] >= 4 * 2 * size


def test_there_is_no_shared_model_to_teach() -> None:
    with pytest.raises(InputError, match="whole models stay"):
        parse("fedfomo() | dkd()")
