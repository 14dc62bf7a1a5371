"""One run, and the part it plays in one round and in one exchange."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from feddkd.engines.interface import Order
from feddkd.errors import RunError
from feddkd.method import Exchange
from feddkd.rounds.costs import Costs
from feddkd.tensors import Groups, Tensors

Row = dict[str, Any]


@dataclass
class Run:
    """One run: the server's state and the costs so far. `index` is the engine's number for it."""

    index: int
    seed: int
    state: Groups
    has_validation: bool
    costs: Costs = field(default_factory=Costs)
    error: RunError | None = None  # the reason why it stopped early
    # a tensor with the dtype and the device of the run, for a state without tensors
    empty: Tensor = field(default_factory=lambda: torch.zeros(()))

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype and the device of the run."""
        for group in self.state.values():
            for tensor in group.values():
                if tensor.is_floating_point():
                    return tensor
        return self.empty


@dataclass
class Turn:
    """One run in one round: the clients that are still in the cohort, and the row to record."""

    run: Run
    round: int
    cohort: tuple[int, ...]
    row: Row
    over: bool = False  # the round has ended before its last exchange
    failed: bool = False  # the server's half raised an error, perhaps because of bad numbers
    loss_is_finite: bool = True  # in all evaluations of the round

    def where(self, exchange: Exchange) -> str:
        """Return the phase, step, round and seed as text."""
        return (
            f"phase {exchange.phase.name!r}, step {exchange.step}, in round {self.round} (seed"
            f" {self.run.seed})"
        )


class Asked(NamedTuple):
    """The orders of one run in an exchange."""

    turn: Turn
    rates: Tensors
    orders: list[Order]
    absent: dict[int, str]  # client -> the reason why its reply does not count
