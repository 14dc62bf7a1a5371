"""The global random generators: seeded by a key while a network is built, and compared."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from feddkd.models.own_generator import OwnGenerator
from feddkd.process_lock import PROCESS_LOCK
from feddkd.randomness import Key, fold

T = TypeVar("T")
TRIES = 3


@contextmanager
def seeded_generators(key: Key) -> Iterator[None]:
    """Seed the global generators of torch, numpy and Python by a key; restore them afterwards.

    This thread draws torch's numbers from its own generator, which no other thread can touch;
    the global one serves the few functions that take none.
    """
    with PROCESS_LOCK, torch.random.fork_rng(devices=[]), OwnGenerator(key, torch.device("cpu")):
        kept = np.random.get_state(), random.getstate()
        seed = fold(key)
        try:
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
            yield
        finally:
            np.random.set_state(kept[0])
            random.setstate(kept[1])


def generator_states(x: Tensor) -> tuple[Any, ...]:
    """Return the states of all global generators, on the device of x."""
    state = torch.cuda.get_rng_state(x.device) if x.is_cuda else torch.get_rng_state()
    return state.numpy().tobytes(), repr(np.random.get_state()), random.getstate()


def draws_globally(
    call: Callable[[], T], x: Tensor, is_same: Callable[[T, T], bool]
) -> tuple[T, bool]:
    """Return a call's result, and whether it draws from a global generator on the device of x.

    Another thread of the program may draw meanwhile: then the results of several calls decide.
    """
    results: list[T] = []
    with PROCESS_LOCK:
        for _ in range(TRIES):
            before = generator_states(x)
            results.append(call())
            if before == generator_states(x):
                return results[-1], False
    alike = all(is_same(results[0], other) for other in results[1:])
    return results[0], threading.active_count() == 1 or not alike
