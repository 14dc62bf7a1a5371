"""Networks built under a seed, so that the seed decides every tensor of them."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from feddkd.randomness import Key, fold

# torch, numpy and Python have one global generator each for all threads
_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def seeded_generators(key: Key) -> Iterator[None]:
    """Seed the global generators of torch, numpy and Python by a key, and put them back afterwards."""
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
