"""One thread: the networks here are small, and two processes that each spin two threads on two cores wait for each other."""

from contextlib import suppress

import torch

torch.set_num_threads(1)

with suppress(ImportError):  # a machine with a GPU may have pytest and no more
    from hypothesis import settings

    settings.register_profile("patient", deadline=None)  # how long an example takes says nothing on a shared machine
    settings.load_profile("patient")
