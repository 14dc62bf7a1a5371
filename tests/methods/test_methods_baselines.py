"""local_only and centralised: against plain PyTorch and by their laws."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from feddkd import InputError
from feddkd.data.batches import Reads, draw
from feddkd.data.federation import SERVER
from small import clients, distance, network, pooled, run

DATA, NET = clients(), network()
LOCAL = "epochs=2, batch_size=8, lr=0.1, lr_decay=0.5, momentum=0.9, weight_decay=0.01"
READS = Reads(8, epochs=2)
SGD = partial(torch.optim.SGD, momentum=0.9, weight_decay=0.01)


def trained(net: nn.Module, x: Any, y: Any, client: int, rounds: int) -> dict[str, Any]:
    """Return a network's weights after the rounds that one client or the server trains alone."""
    net = copy.deepcopy(net)
    for t in range(1, rounds + 1):
        optimiser = SGD(net.parameters(), lr=0.1 * 0.5 ** (t - 1))
        for at in draw(READS, len(y), (3, t, 0, 1, client)):
            optimiser.zero_grad()
            cross_entropy(net(x[at]), y[at]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return dict(net.state_dict())


def test_centralised_is_training_on_the_examples_of_all_clients() -> None:
    expected = trained(NET, *pooled(DATA), SERVER, rounds=3)
    result = run(f"centralised({LOCAL})", DATA, NET, rounds=3)
    assert distance(result.params, expected) < 1e-10
    last = result.history[-1]
    assert last["communications"] == last["bytes_up"] == last["bytes_down"] == 0


def test_centralised_does_not_depend_on_how_the_examples_are_divided() -> None:
    whole = [pooled(DATA)]
    ends = [run(f"centralised({LOCAL})", data, NET, rounds=2).params for data in (DATA, whole)]
    assert distance(*ends) == 0


def test_local_only_is_every_client_training_alone() -> None:
    result = run(f"local_only({LOCAL})", DATA, NET, rounds=3)
    assert not result.params
    for k, (x, y) in enumerate(DATA):
        assert distance(result.state_dict(client=k), trained(NET, x, y, k, rounds=3)) < 1e-10
    assert result.history[-1]["bytes_up"] == 0


def test_local_only_with_one_client_is_fedavg_with_one_client() -> None:
    alone = [run(f"{name}({LOCAL})", DATA[:1], NET) for name in ("local_only", "fedavg")]
    assert alone[0].history[-1]["test_loss"] == pytest.approx(alone[1].history[-1]["test_loss"])


@pytest.mark.parametrize("baseline", ["local_only()", "centralised()"])
def test_there_is_nothing_to_distil_behind_a_baseline(baseline: str) -> None:
    with pytest.raises(InputError, match="phase 'distil'"):
        run(f"{baseline} | dkd()", DATA, NET)
