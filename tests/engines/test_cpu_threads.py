"""One CPU thread where operations are small, and what the user asks for otherwise."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from feddkd import functional, parse
from feddkd.data.examples import Examples
from feddkd.data.federation import Federation, assemble
from feddkd.data.transforms import transform
from feddkd.engines import threads
from feddkd.engines.threads import fitting_threads, set_threads

SMALL = nn.Sequential(nn.Flatten(), nn.Linear(48, 8))
LARGE = nn.Sequential(nn.Conv2d(3, 512, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8192, 2))


def federation(examples: int) -> Federation:
    def some(count: int) -> Examples:
        x = torch.zeros(count, 3, 4, 4, dtype=torch.uint8)
        return Examples(x, torch.zeros(count, dtype=torch.int64))

    return assemble([some(examples)], some(2), some(2), transform("", 255.0))


def seen(net: nn.Module, examples: int, batch: int) -> int:
    """Return the number of threads during a run."""
    model, method = functional(net), parse(f"fedavg(batch_size={batch})")
    params, buffers = model.initial(("init", 0))
    state = {"params": params, "buffers": buffers}
    with fitting_threads(model, method, federation(examples), state, torch.float32):
        return torch.get_num_threads()


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch: pytest.MonkeyPatch) -> object:
    """A machine on which torch starts two threads."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "DEFAULT", 2)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("net", "examples", "batch", "expected"),
    [(SMALL, 40, 8, 1), (SMALL, 40, 40, 1), (LARGE, 1, 1, 1), (LARGE, 200, 200, 2)],
    ids=["small", "small, whole batch", "large, few examples", "large"],
)
def test_small_operations_take_one_thread(
    net: nn.Module, examples: int, batch: int, expected: int
) -> None:
    assert seen(net, examples, batch) == expected
    assert torch.get_num_threads() == 2, "the number is restored"


def test_what_the_user_sets_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(3)
    assert seen(SMALL, 40, 8) == 3
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    set_threads(2)
    assert os.environ["OMP_NUM_THREADS"] == "2"
    assert seen(SMALL, 40, 8) == 2


def test_a_program_that_simulates_in_several_threads_keeps_the_number() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(seen, SMALL, 40, 8).result() == 2
