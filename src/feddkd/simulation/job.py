"""A job: what is simulated, before an engine is chosen."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from feddkd.data.federation import Federation
from feddkd.method import Method
from feddkd.models.functional import Model
from feddkd.rounds.attacks import NO_ATTACK, Attack
from feddkd.rounds.availability import Tolerance
from feddkd.rounds.evaluation import USUAL, Evaluation
from feddkd.rounds.loop import PATIENT, cohort_size
from feddkd.rounds.selection import UNIFORM, Selection
from feddkd.tensors import Tensors

DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Start(NamedTuple):
    """The start of one run: its seed, its data and its first weights."""

    seed: int
    federation: Federation
    params: Tensors
    buffers: Tensors


@dataclass(frozen=True)
class Job:
    """One method on one network, with one or more runs (seeds) in lock-step."""

    model: Model
    method: Method
    starts: Sequence[Start]
    dtype: torch.dtype = torch.float32
    rounds: int = 1
    cohort: int | float = 1.0
    evaluation: Evaluation = USUAL
    tolerance: Tolerance = PATIENT
    diagnostics: bool = False
    selection: Selection = UNIFORM
    attack: Attack = NO_ATTACK  # `method` must be attack.on(method)
    delta: float | None = None  # goes with the epsilon that methods with noise report

    @property
    def clients(self) -> int:
        """The number of clients, K."""
        return len(self.starts[0].federation.train)

    @property
    def cohort_size(self) -> int:
        """The number of clients in a cohort, m; raises an InputError if there are too few."""
        return cohort_size(self.cohort, self.clients, self.tolerance.min_clients)
