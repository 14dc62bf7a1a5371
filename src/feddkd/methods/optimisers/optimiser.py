"""An optimiser: a pair of pure functions.

Its state is groups of tensors. A client has them in its carry, with fresh values in every round; a
server has them in its state, as long as the run lasts.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from feddkd.tensors import Groups, Tensors


class Optimiser(NamedTuple):
    """An optimiser: `init` makes its state, `update` makes one step."""

    init: Callable[[Tensors], Groups]  # params -> state
    # (params, grads, state, lr) -> (params, state)
    update: Callable[[Tensors, Tensors, Groups, Tensor], tuple[Tensors, Groups]]
