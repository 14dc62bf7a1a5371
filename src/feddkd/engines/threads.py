"""The number of CPU threads: one where operations are small, since threads then only wait.

torch starts a thread for each core, and idle threads spin: a small job takes several times its
processor time, and on a busy machine many times its time.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from feddkd.data.federation import Federation
from feddkd.method import Method
from feddkd.models.functional import Model
from feddkd.tensors import Groups
from feddkd.trees import take

DEFAULT = torch.get_num_threads()
ASKED = "OMP_NUM_THREADS"
FEW = 4  # examples of the pass that is looked at
# Numbers that an operation reads and writes, in the mean: one thread takes about a tenth of a
# millisecond for so many, below which several are no faster.
SMALL = 200_000


def set_threads(count: int) -> None:
    """Set the number of threads that the user asks for."""
    os.environ[ASKED] = str(count)
    torch.set_num_threads(count)


@contextmanager
def fitting_threads(
    model: Model, method: Method, federation: Federation, start: Groups, dtype: torch.dtype
) -> Iterator[None]:
    """Compute with one thread if the operations of a step are small.

    A number that the user has set stays. So does the number in a program that simulates in several
    threads, which share it.
    """
    before = torch.get_num_threads()
    asked = before != DEFAULT or ASKED in os.environ
    shared = threading.current_thread() is not threading.main_thread()
    free = DEFAULT > 1 and not (asked or shared) and federation.device.type == "cpu"
    if not free or numbers_an_operation(model, method, federation, start, dtype) > SMALL:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def numbers_an_operation(
    model: Model, method: Method, federation: Federation, start: Groups, dtype: torch.dtype
) -> float:
    """Return how many numbers an operation of a forward pass reads and writes, in the mean.

    The pass is that of a few examples; activations grow with the batch, and weights do not.
    """
    indices = federation.indices("train", 0)[:FEW]
    if len(indices) == 0:
        return 0.0
    x = federation.transform(take(federation.x, torch.from_numpy(indices)), dtype)
    batch = max((phase.reads.batch_size for phase in method.phases), default=FEW)
    with torch.no_grad(), NumberCounter(len(indices)) as counter:
        model(start["params"], start["buffers"], x, mode="eval")
    most = max(federation.counts("train"))
    grown = counter.activations * min(batch, most) / len(indices)
    return float((grown + counter.weights) / max(counter.operations, 1))


class NumberCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations, and the numbers in their tensors, apart from views.

    A tensor whose first side is the number of examples is an activation.
    """

    def __init__(self, examples: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.examples = examples
        self.operations = self.activations = self.weights = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not getattr(func, "is_view", False):
            self.operations += 1
            for tensor in tree_leaves((args, result)):
                if isinstance(tensor, Tensor):
                    grows = tensor.dim() > 0 and tensor.shape[0] % self.examples == 0
                    self.activations += tensor.numel() * grows
                    self.weights += tensor.numel() * (not grows)
        return result
