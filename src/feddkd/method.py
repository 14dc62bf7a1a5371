"""A federated method: a sequence of exchanges, as an immutable value.

In an exchange the server sends named tensors to a cohort of clients, each client computes on its
own data and uploads tensors, and the server folds the uploads into its state. A `Phase` is one kind
of exchange, a `Method` is a tuple of phases, and `a | b` runs b's phases after a's. All functions
of a phase are pure: they do not change their arguments, do not call `.item()` and do not branch on
a tensor, so an engine may loop, vmap, compile or capture them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from feddkd.data.batches import Reads
from feddkd.errors import InputError, choices
from feddkd.models.functional import Model
from feddkd.randomness import Key
from feddkd.spec.registry import Spelled
from feddkd.spec.schedules import ONCE, Repeat, Schedule
from feddkd.tensors import Groups, Tensors, only, without


class Batch(NamedTuple):
    """The examples of one step of a client."""

    x: Tensor
    y: Tensor
    share: Tensor  # weights of the examples; they sum to one, and padding has weight 0
    key: Tensor  # the step's key as one whole number, for dropout

    def marks(self, classes: int) -> Tensor:
        """Return the labels one-hot, shape (batch, classes), with rows of zeros for padding.

        torch's one_hot cannot be captured in a CUDA graph.
        """
        equal = self.y.unsqueeze(-1) == torch.arange(classes, device=self.y.device)
        return (equal & (self.share > 0).unsqueeze(-1)).to(self.share.dtype)


# --- the client's half

# (model, sent, carry, memo) -> (upload, memo)
Finish = Callable[[Model, Groups, Groups, Groups], tuple[Groups, Groups]]


@dataclass(frozen=True)
class Fold:
    """A client that steps through its batches, starting from a copy of the tensors sent.

    The engine owns the loop over the batches and calls `step` once for each.
    """

    start: Callable[[Model, Groups, Groups], Groups]  # (model, sent, memo) -> carry
    step: Callable[[Model, Groups, Groups, Batch], Groups]  # (model, sent, carry, batch) -> carry
    finish: Finish
    # True if the upload is the sum of the uploads of the single batches and the memo does not
    # change: then an engine may divide a client's batches among several lanes
    sums: bool = False


Targets = Callable[[Model, Groups, Batch], Tensor]  # (model, memo, batch) -> targets, held constant
# (model, w, sent, memo, batch, targets) -> loss
Loss = Callable[[Model, Tensors, Groups, Groups, Batch, Tensor], Tensor]


@dataclass(frozen=True)
class Gradient:
    """A client that uploads the gradient of a loss at the shared weights sent["params"].

    `targets` must not depend on `sent`: an engine may compute the targets of all J steps at once.
    """

    targets: Targets
    loss: Loss
    # runs in the same exchange on the examples that reads.spare sets aside; its upload is sent
    # with the gradient
    probe: Fold | None = None


class Collect(Enum):
    """Rules by which the server gathers one group of the uploads."""

    MEAN_BY_EXAMPLES = "mean by examples"  # weights n_k / sum n
    MEAN_BY_CLIENTS = "mean by clients"  # weights 1 / m
    EVERY = "every client's"  # stacked on a new first axis, in the order of the answering clients


# --- exchanges, phases, methods

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
    # a tensor with the dtype and the device of the run: the state has no tensors to take them from
    # where whole models are private
    like: Tensor = torch.zeros(())


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
    at: Literal["clients", "server"] = "clients"  # "server": it runs the client half itself

    # Its place in a round.
    # True if it improves an existing shared model: then the model before it is evaluated, too
    refines: bool = False
    # True if it uses the change of the shared model that earlier phases of the round made
    follows: bool = False

    # State that outlives the exchange.
    needs: frozenset[str] = frozenset()  # memo groups that an earlier phase of the round must leave
    leaves: frozenset[str] = frozenset()  # memo groups that this phase leaves for later phases
    keeps: frozenset[str] = frozenset()  # memo groups that a client keeps from round to round
    # (model, state, world) -> groups to add to the server's state before the first round
    opens: Callable[[Model, Groups, World], Groups] | None = None
    # (model, state, world) -> groups to add to every client's memo before the first round
    brings: Callable[[Model, Groups, World], Groups] | None = None

    # Standard deviation of the noise in what the server gathers, in units of the most that one
    # client may add; the privacy accountant reads it.
    noise: float = 0.0

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
        return {
            name: torch.full((), rate(round, self.step), dtype=like.dtype, device=like.device)
            for name, rate in self.phase.rates.items()
        }


# The tensors that never leave their client: none; the running statistics of batch norm; whole
# batch-norm layers; the whole model.
Private = Literal["none", "statistics", "norm", "model"]


@dataclass(frozen=True, eq=False)
class Method(Spelled):
    """A federated method: its phases, and the tensors that clients keep private.

    `private` names kinds of tensors, `private_patterns` patterns of names ("head.*").
    """

    phases: tuple[Phase, ...]
    private: frozenset[Private] = frozenset({"none"})
    private_patterns: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        """Return the text of the method, or the names of its phases if it was made by hand."""
        return str(self) or f"<Method with phases {[phase.name for phase in self.phases]}>"

    def __or__(self, other: "Method") -> "Method":
        """Return a method that runs this method's phases, then the other's.

        Either both have a text or neither has: else the text of the whole would lack a part.
        """
        if bool(self.calls) != bool(other.calls):
            raise InputError(
                "cannot join a registered method and one that is not registered with |: register"
                f" both with METHODS.register ({self!r} and {other!r})"
            )
        joined = Method(
            self.phases + other.phases,
            self.private | other.private,
            self.private_patterns | other.private_patterns,
            calls=self.calls + other.calls,
        )
        joined.check_order()
        return joined

    @property
    def personal(self) -> bool:
        """Return True if clients keep private tensors, so that their models differ."""
        return self.private != {"none"} or bool(self.private_patterns)

    def check_order(self) -> None:
        """Raise InputError if a phase needs something that no earlier phase leaves."""
        left: set[str] = set()
        for number, phase in enumerate(self.phases):
            if phase.follows and number == 0:
                raise InputError(
                    f"phase {phase.name!r} uses the change that earlier phases of the round made to"
                    " the model, and there is no earlier phase: put a method that trains locally"
                    f" first, as in fedavg() | {self}"
                )
            if missing := phase.needs - left - phase.keeps:
                raise InputError(
                    f"phase {phase.name!r} needs {', '.join(sorted(missing))!r} at the client, and"
                    " no earlier phase leaves it there: put a method that trains locally first, as"
                    f" in fedavg() | {self}"
                )
            if (phase.refines or phase.follows) and "model" in self.private:
                action = "teaches" if phase.refines else "moves"
                raise InputError(
                    f"phase {phase.name!r} {action} a shared model, and in {self} whole models stay"
                    " with the clients"
                )
            left |= phase.leaves | phase.keeps

    def fitted(self, model: Model) -> "Method":
        """Return the method for this network: phases that depend on the network are replaced."""
        phases: list[Phase] = []
        for phase in self.phases:
            phases += phase.unfolds(model) if phase.unfolds else (phase,)
        return replace(self, phases=tuple(phases))

    def in_stored_order(self, distilling: bool = True) -> "Method":
        """Return the method without shuffling of examples.

        With distilling=False the phases that refine a model still shuffle.
        """
        phases = (
            _in_stored_order(phase) if distilling or not phase.refines else phase
            for phase in self.phases
        )
        return replace(self, phases=tuple(phases))

    def private_names(self, model: Model) -> frozenset[str]:
        """Return the names of the network's tensors that stay with the clients."""
        names = {
            "none": frozenset[str](),
            "statistics": model.buffer_names & model.norm_names,
            "norm": model.norm_names,
            "model": model.param_names | model.buffer_names,
        }
        kinds = frozenset[str]().union(*(names[kind] for kind in self.private))
        private = kinds.union(*(_matching(pattern, model) for pattern in self.private_patterns))
        if private >= model.param_names and any(
            phase.refines or phase.follows for phase in self.phases
        ):
            raise InputError(
                f"in {self} all trained tensors stay with the clients, so there is no shared model"
                " to teach"
            )
        return private

    def start(
        self, model: Model, params: Tensors, buffers: Tensors, world: World = NOWHERE
    ) -> tuple[Groups, Groups]:
        """Return the server's state and every client's memo before the first round.

        The state holds the shared tensors of the initial model, the memo the private ones; phases
        add groups to both.
        """
        private = self.private_names(model)
        state: Groups = {"params": without(params, private), "buffers": without(buffers, private)}
        memo: Groups = {"private": only({**params, **buffers}, private)} if private else {}
        like = next(iter(params.values()), world.like)
        for number, phase in enumerate(self.fitted(model).phases):
            phase_world = world._replace(key=(*world.key, number), like=like)
            if phase.brings:
                memo = {**memo, **phase.brings(model, state, phase_world)}
            if phase.opens:
                state = {**state, **phase.opens(model, state, phase_world)}
        return state, memo

    def plan(self, round: int, wanted: frozenset[str] = frozenset()) -> list[Exchange]:
        """Return the exchanges of a round, in order.

        Clients keep the memo groups in `wanted` until the end of the round.
        """
        retain = frozenset({"private"}).union(wanted, *(phase.keeps for phase in self.phases))
        index = sum(phase.client is not None for phase in self.phases)
        exchanges: list[Exchange] = []
        for phase in reversed(self.phases):  # backwards: `retain` is what later exchanges need
            index -= phase.client is not None
            steps = phase.repeat(round)
            for step in range(steps, 0, -1):
                exchanges.append(Exchange(phase, index, step, steps, retain))
                retain |= phase.needs
        return exchanges[::-1]


def _matching(pattern: str, model: Model) -> frozenset[str]:
    """Return the tensors that a pattern names. Any name of a tensor with several names counts."""
    tensors = model.tensors
    names = {**tensors.saved, **tensors.slots}
    matching = frozenset(names[name] for name in names if fnmatchcase(name, pattern))
    if not matching:
        some = sorted(tensors.saved)[:20]
        more = ", ..." if len(some) == 20 else ""
        raise InputError(
            f"no tensor of the network is called {pattern!r}; there are: {choices(some)}{more}"
        )
    if matching <= tensors.constants:
        raise InputError(
            f"{pattern!r} names only tensors that never leave a client: frozen tensors, or tensors"
            " that state_dict() does not save"
        )
    return matching - tensors.constants


def _in_stored_order(phase: Phase) -> Phase:
    """Return the phase without shuffling of examples."""
    phase = replace(phase, reads=replace(phase.reads, shuffle=False))
    if (unfolds := phase.unfolds) is None:
        return phase
    return replace(phase, unfolds=lambda model: tuple(map(_in_stored_order, unfolds(model))))


def probe_of(targets: Targets, loss: Loss) -> Fold:
    """Return a fold that uploads the loss at the shared weights, as upload["probe"]["loss"]."""

    def start(model: Model, sent: Groups, memo: Groups) -> Groups:
        return {**memo, "probe": {"loss": next(iter(sent["params"].values())).new_zeros(())}}

    def step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        value = loss(model, sent["params"], sent, carry, batch, targets(model, carry, batch))
        return {**carry, "probe": {"loss": value}}

    def finish(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
        return {"probe": carry["probe"]}, memo

    return Fold(start, step, finish)


def probing(phase: Phase) -> Phase | None:
    """Return the probe of a gradient phase as a phase, or None if it has no probe."""
    if not isinstance(phase.client, Gradient) or phase.client.probe is None:
        return None
    aside = replace(phase.reads, aside=True, random=False)
    collect = {group: rule for group, rule in phase.collect.items() if group != "gradient"}
    return replace(
        phase, name=f"{phase.name} probe", client=phase.client.probe, reads=aside, collect=collect
    )


def own_model(
    model: Model, sent: Groups, memo: Groups
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a client's model, (params, buffers): the tensors sent and its private tensors."""
    private = memo.get("private", {})
    params = {**sent["params"], **only(private, model.param_names)}
    return params, {**sent["buffers"], **only(private, model.buffer_names)}


def uploads(model: Model, params: Tensors, buffers: Tensors, memo: Groups) -> tuple[Groups, Groups]:
    """Split a client's model into its upload and the memo that keeps its private tensors."""
    names = frozenset(memo.get("private", {}))
    upload = {"params": without(params, names), "buffers": without(buffers, names)}
    return upload, {**memo, "private": only({**params, **buffers}, names)} if names else dict(memo)
