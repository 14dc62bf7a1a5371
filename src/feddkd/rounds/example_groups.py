"""Metrics of groups of test examples, such as those of one sex or one hospital.

Each group is a test set that the serial engine judges. So a group has every metric, on whatever
engine the run is, and no other number of the run changes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from feddkd.data.batches import Indices
from feddkd.data.federation import Federation
from feddkd.data.tables import numbered
from feddkd.engines.interface import Engine
from feddkd.engines.serial import Serial
from feddkd.errors import InputError
from feddkd.models.functional import Model
from feddkd.rounds.evaluation import Evaluation, measure
from feddkd.rounds.turns import Row, Run
from feddkd.tensors import Groups

ByGroup = Callable[[Engine, Run], Row]


def no_groups(engine: Engine, run: Run) -> Row:
    """Return nothing: the examples have no groups."""
    return {}


@dataclass(frozen=True)
class GroupTest:
    """A federation whose test examples are those of one group, and who has some of them."""

    name: str
    federation: Federation
    clients: frozenset[int]


def group_tests(federation: Federation, is_global: bool) -> list[GroupTest]:
    """Return a test of each group in the examples that are judged, in the order of their names."""
    if federation.groups is None:
        return []
    groups, own = federation.groups, federation.own_test
    shared = is_global or own is None
    lists = [federation.test] if shared or own is None else own
    names = set(groups[np.concatenate(lists)].tolist()) - {""}
    if not names:
        raise InputError("no test example that is judged has a group")

    def test_of(name: str) -> GroupTest:
        def those(indices: Indices) -> Indices:
            return indices[np.flatnonzero(groups[indices] == name)]

        parts = None if own is None else [those(indices) for indices in own]
        part = replace(federation, test=those(federation.test), own_test=parts)
        every = range(len(federation.train))
        having = (k for k in every if shared or parts is None or len(parts[k]))
        return GroupTest(name, part, frozenset(having))

    return [test_of(name) for name in numbered(list(names))[1]]


@dataclass(frozen=True)
class GroupMeasure:
    """The measuring of the models of runs on each group of test examples."""

    model: Model
    federations: Sequence[Federation]  # by run
    memos: Sequence[Groups]  # the first memo of the clients of each run
    dtype: torch.dtype
    evaluation: Evaluation

    @cached_property
    def tests(self) -> list[list[GroupTest]]:
        """The groups of each run."""
        is_global = self.evaluation.is_global
        return [group_tests(federation, is_global) for federation in self.federations]

    def check(self, engine: Engine) -> None:
        """Raise InputError if an engine's models cannot be judged by group."""
        if any(self.tests) and engine.remote and not self.evaluation.is_global:
            raise InputError(
                "metrics of groups need the test examples on this machine, and on Flower those of"
                ' clients stay on their nodes: set evaluation = "global"'
            )

    def __call__(self, engine: Engine, run: Run) -> Row:
        """Return a run's metrics by group, and those of each client by group.

        A group that no evaluated client has is left out.
        """
        if not self.tests[run.index]:
            return {}
        held = {} if self.evaluation.is_global else engine.memos_of(run.index)
        row: Row = {}
        for test in self.tests[run.index]:
            evaluation = replace(self.evaluation, among=test.clients)
            if not evaluation.chosen(len(test.federation.train)):
                continue
            alone = Serial(self.model, [test.federation], [self.memos[run.index]], self.dtype)
            alone.restore(0, held)
            (found,) = measure(alone, [(0, run.state)], evaluation, "test")
            values = {f"test_{name}_by_group": value for name, value in found.values.items()}
            each = {f"test_client_{name}_by_group": v for name, v in found.by_client.items()}
            for key, value in {**values, **each}.items():
                row.setdefault(key, {})[test.name] = value
        return row
