"""One thread: the networks here are small, and two processes that each spin two threads on two cores wait for each other."""

import torch

torch.set_num_threads(1)
