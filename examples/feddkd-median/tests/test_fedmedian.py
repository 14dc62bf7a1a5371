"""FedMedian obeys the laws of every method and its own."""

import torch

from feddkd import simulate
from feddkd.testing import check_method, rehearse
from feddkd_median import take_median


def test_it_obeys_the_laws_of_every_method() -> None:
    check_method("fedmedian(epochs=1, batch_size=8)")


def test_dkd_goes_behind_it() -> None:
    rehearse("fedmedian(epochs=1, batch_size=8) | dkd(steps=2, batch_size=8)", rounds=1)


def test_the_median_is_that_of_each_coordinate() -> None:
    stacked = {"w": torch.tensor([[1.0, 9.0], [2.0, 7.0], [100.0, 8.0]])}
    state = take_median(None, {}, {"params": stacked, "buffers": {}}, {})  # type: ignore[arg-type]
    assert state["params"]["w"].tolist() == [2.0, 8.0]
    pair = take_median(None, {}, {"params": {"w": stacked["w"][:2]}, "buffers": {}}, {})  # type: ignore[arg-type]
    assert pair["params"]["w"].tolist() == [1.5, 8.0]


def test_one_bad_client_does_not_move_it_far() -> None:
    draw = torch.Generator().manual_seed(0)
    good = [
        (torch.randn(20, 2, generator=draw), torch.randint(0, 2, (20,), generator=draw))
        for _ in range(4)
    ]
    bad = torch.full((20, 2), 1e6), torch.zeros(20, dtype=torch.int64)

    def farthest(method: str) -> float:
        result = simulate(
            model=lambda: torch.nn.Linear(2, 2), clients=[*good, bad], test=good[0], method=method
        )
        return max(tensor.abs().max().item() for tensor in result.params.values())

    assert farthest("fedmedian()") < 10 < farthest("fedavg()")
