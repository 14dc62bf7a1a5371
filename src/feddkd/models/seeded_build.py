"""The global random generators: seeded by a key while a network is built, and compared."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from feddkd.randomness import Key, fold

# torch, numpy and Python each have one global generator for all threads
_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def seeded_generators(key: Key) -> Iterator[None]:
    """Seed the global generators of torch, numpy and Python by a key; restore them afterwards."""
    with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
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
