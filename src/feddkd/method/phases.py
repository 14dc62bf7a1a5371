"""A kind of exchange between the server and clients, and one entry of a round's plan."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from feddkd.data.batches import Reads
from feddkd.method.client import Fold, Gradient
from feddkd.method.codec import Codec
from feddkd.models.functional import Model
from feddkd.randomness import Key
from feddkd.spec.schedules import ONCE, Repeat, Schedule
from feddkd.tasks.task import Offer
from feddkd.tensors import Groups, Tensors
from feddkd.trees import Tree

# Numbers that a client knows of the examples it reads: the mini-batches in an epoch, and the
# examples of each class.
Fact = Literal["batches", "labels"]


class Collect(Enum):
    """Rules by which the server gathers one group of the uploads."""

    MEAN_BY_EXAMPLES = "mean by examples"  # weights n_k / sum n
    MEAN_BY_CLIENTS = "mean by clients"  # weights 1 / m
    EVERY = "every client's"  # stacked on a new first axis, in the order of the answering clients


# (model, state, collected, rates) -> state. Besides the phase's own rates, `rates` says who
# answered: "clients" (their numbers, in the order in which uploads are stacked), "examples" (n_k)
# and "share" (of all clients). state["start"] holds the weights with which the round began.
ServerFn = Callable[[Model, Groups, Groups, Tensors], Groups]


class World(NamedTuple):
    """Facts about a run that a method may use before the first round."""

    key: Key = ("start",)  # for random draws
    clients: int = 1
    classes: int = 2
    public: int = 0  # number of public examples, which the server and all clients may read
    outputs: int = 2  # of the network; there may be more outputs than classes
    output: tuple[int, ...] = (2,)  # the shape of the network's output for one example
    # a tensor with the dtype and the device of the run: the state has no tensors to take them from
    # where whole models are private
    like: Tensor = torch.zeros(())
    example: Tree = torch.zeros(())  # the input of one example, without a first axis


NOWHERE, NOTHING = World(), Reads(1, source="none")


class Part(NamedTuple):
    """Some clients of a cohort, with groups sent only to them.

    A group replaces the group of that name that all clients are sent.
    """

    clients: tuple[int, ...]
    sent: Groups


@dataclass(frozen=True)
class Phase:
    """One kind of exchange. Without a client half only the server computes."""

    name: str
    client: Fold | Gradient | None
    server: ServerFn
    reads: Reads = NOTHING  # the examples of the client half, in batches
    # facts of these examples that `start` finds in memo["facts"]
    facts: frozenset[Fact] = frozenset()

    # What is sent and what is uploaded.
    collect: Mapping[str, Collect] = field(default_factory=dict)  # upload group -> rule
    # name -> upload group; the server finds under that name the uploads of the single clients, too
    every: Mapping[str, str] = field(default_factory=dict)
    sends: tuple[str, ...] = ("params", "buffers")  # groups of the server's state
    # name -> schedule; clients find the values in sent["rates"], the server in `rates`
    rates: Mapping[str, Schedule] = field(default_factory=dict)

    # Who takes part, and how often.
    repeat: Repeat = ONCE
    # (state, cohort, repetition) -> the parts of the cohort that are asked in this repetition;
    # clients in no part are not asked
    parts: Callable[[Groups, tuple[int, ...], int], Sequence[Part]] | None = None
    # (model) -> the phases that replace this one, where they depend on the network
    unfolds: "Callable[[Model], tuple[Phase, ...]] | None" = None
    # (state after a repetition) -> True to skip the repetitions that are left in this round
    over: Callable[[Groups], Tensor] | None = None
    # "server": the server runs the client half itself. "judging": all clients do it before each
    # evaluation of their own models, and it is part of the evaluation, not of a round
    at: Literal["clients", "server", "judging"] = "clients"

    # Its place in a round.
    # True if it improves an existing shared model: then the model before it is evaluated, too
    refines: bool = False
    # True if it is nothing without earlier phases of the round, whose change of the shared model
    # it uses
    follows: bool = False

    # State that outlives the exchange.
    needs: frozenset[str] = frozenset()  # memo groups that an earlier phase of the round must leave
    leaves: frozenset[str] = frozenset()  # memo groups that this phase leaves for later phases
    keeps: frozenset[str] = frozenset()  # memo groups that a client keeps from round to round
    # (model, state, world) -> groups to add to the server's state before the first round
    opens: Callable[[Model, Groups, World], Groups] | None = None
    # (model, state, world) -> groups to add to every client's memo before the first round
    brings: Callable[[Model, Groups, World], Groups] | None = None

    requires: frozenset[Offer] = frozenset()  # what it needs of the task

    # Standard deviation of the noise in what the server gathers, in units of the most that one
    # client may add; the privacy accountant reads it.
    noise: float = 0.0
    # The most that the L2 norm of a client's update may be; the client's half sees to it.
    clip: float | None = None
    codec: Codec | None = None  # how uploads are compressed; the client's half has done it

    @property
    def asks_clients(self) -> bool:
        """Return True if clients compute in this phase."""
        return self.client is not None and self.at == "clients"


@dataclass(frozen=True)
class Exchange:
    """One entry of a round's plan: repetition `step` of `steps` of a phase.

    `index` is the number of the phase among those with a client half. Random draws depend on it, so
    clients read the same batches with and without phases in which only the server computes.
    `retain` names the memo groups that clients must keep afterwards; None means all of them.
    """

    phase: Phase
    index: int = 0
    step: int = 1
    steps: int = 1
    retain: frozenset[str] | None = None

    def rates(self, round: int, like: Tensor) -> dict[str, Tensor]:
        """Return the phase's rates in this round, with the dtype and the device of `like`."""
        # torch.full makes them on the device; a copy would make host and device wait
        kind: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
        return {
            name: torch.full((), _fitting(rate(round, self.step), like), **kind)
            for name, rate in self.phase.rates.items()
        }


def _fitting(rate: float, like: Tensor) -> float:
    """Return the rate, or infinity if it is too large for the dtype: then the run diverges."""
    return rate if abs(rate) <= torch.finfo(like.dtype).max else math.copysign(math.inf, rate)


def probing(phase: Phase) -> Phase | None:
    """Return the probe of a gradient phase as a phase, or None if it has no probe."""
    if not isinstance(phase.client, Gradient) or phase.client.probe is None:
        return None
    aside = replace(phase.reads, aside=True, random=False)
    collect = {group: rule for group, rule in phase.collect.items() if group != "gradient"}
    return replace(
        phase, name=f"{phase.name} probe", client=phase.client.probe, reads=aside, collect=collect
    )


def in_stored_order(phase: Phase) -> Phase:
    """Return the phase without shuffling of examples."""
    phase = replace(phase, reads=replace(phase.reads, shuffle=False))
    if (unfolds := phase.unfolds) is None:
        return phase
    return replace(phase, unfolds=lambda model: tuple(map(in_stored_order, unfolds(model))))
