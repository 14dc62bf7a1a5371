"""What a federated method is: a sequence of exchanges, as an immutable value.

In an exchange the server sends named tensors to a cohort of clients, each client computes beside
its own data, and the server folds what comes back into its state. A `Phase` is one kind of
exchange, a `Method` a tuple of phases, and `a | b` runs b's phases after a's. All functions in here
are pure: they change nothing they are given, take no `.item()` and branch on no tensor, so that an
engine may loop, vmap, compile or capture them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from fnmatch import fnmatchcase
from itertools import accumulate
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
    """What a client sees in one step. `share` weighs the examples and sums to one, so a mean is a
    weighted sum: padding has share 0.
    """

    x: Tensor
    y: Tensor
    share: Tensor
    key: Tensor  # the step's key as one whole number, for dropout

    def marks(self, classes: int) -> Tensor:
        """(batch, classes): 1 where an example has that label, else 0; padding has none. (one_hot
        fits no CUDA graph.)
        """
        own = self.y.unsqueeze(-1) == torch.arange(classes, device=self.y.device)
        return (own & (self.share > 0).unsqueeze(-1)).to(self.share.dtype)


# --- what a client does


# (model, sent, carry, memo) -> (upload, memo)
Finish = Callable[[Model, Groups, Groups, Groups], tuple[Groups, Groups]]


@dataclass(frozen=True)
class Fold:
    """The client iterates on its own copy.

    The engine owns the loop over batches; `step` is all it has to repeat.
    """

    start: Callable[[Model, Groups, Groups], Groups]  # (model, sent, memo) -> carry
    step: Callable[[Model, Groups, Groups, Batch], Groups]  # (model, sent, carry, batch) -> carry
    finish: Finish
    # whether the upload is the sum of what each batch by itself would bring, and the memo stays:
    # batches may be shared out
    sums: bool = False


Targets = Callable[[Model, Groups, Batch], Tensor]  # (model, memo, batch) -> targets, held constant
# (model, w, sent, memo, batch, targets) -> loss
Loss = Callable[[Model, Tensors, Groups, Groups, Batch, Tensor], Tensor]


@dataclass(frozen=True)
class Gradient:
    """The client differentiates a loss at the shared weights sent["params"] and uploads the
    gradient.

    `targets` must not depend on what is sent: an engine may compute the targets of all J steps at
    once.
    """

    targets: Targets
    loss: Loss
    # done at the same time, on examples that reads.spare sets aside; its upload joins the gradient
    probe: Fold | None = None


class Collect(Enum):
    """How the server gathers one group of the uploads."""

    MEAN_BY_EXAMPLES = "mean by examples"  # weights n_k / sum n
    MEAN_BY_CLIENTS = "mean by clients"  # weights 1 / m
    # stacked along a new first axis, in the order of the clients that answered
    EVERY = "every client's"


# --- exchanges, phases, methods

# (model, state, collected, rates) -> state. The server also finds state["start"], the weights the
# round began with, and in rates who answered: "clients" (their numbers, in the order in which
# uploads are stacked), "examples" (n_k), "share" (of all clients).
ServerFn = Callable[[Model, Groups, Groups, Tensors], Groups]


class World(NamedTuple):
    """What a method may know of a run before it begins."""

    key: Key = ("start",)  # for random draws
    clients: int = 1
    classes: int = 2
    public: int = 0  # examples that the server holds and everybody may see
    outputs: int = 2  # of the network; there may be more of them than classes
    # of the run's own type and on its device: where whole models are private, the state is empty
    like: Tensor = torch.zeros(())


NOWHERE, NOTHING = World(), Reads(1, source="none")


class Part(NamedTuple):
    """Some clients of a cohort, and the groups sent to them alone: besides what everybody is sent,
    or in its place.
    """

    clients: tuple[int, ...]
    sent: Groups


@dataclass(frozen=True)
class Phase:
    """One kind of exchange.

    Without a client half it is the server's own business and nothing is exchanged.
    """

    name: str
    client: Fold | Gradient | None
    server: ServerFn
    reads: Reads = NOTHING
    # upload group -> how it is gathered
    collect: Mapping[str, Collect] = field(default_factory=dict)
    # name -> upload group that the server wants client by client as well
    every: Mapping[str, str] = field(default_factory=dict)
    sends: tuple[str, ...] = ("params", "buffers")  # groups of the server's state
    # arrive with what is sent, as sent["rates"], and at the server
    rates: Mapping[str, Schedule] = field(default_factory=dict)
    repeat: Repeat = ONCE
    # (state, cohort, repetition) -> the parts of the cohort that are asked; clients of no part sit
    # this repetition out
    parts: Callable[[Groups, tuple[int, ...], int], Sequence[Part]] | None = None
    # the phases it stands for, where those depend on the network
    unfolds: "Callable[[Model], tuple[Phase, ...]] | None" = None
    # of the server's state, after a repetition: whether to leave out the rest
    over: Callable[[Groups], Tensor] | None = None
    # the server may work through examples of its own as if it were a client
    at: Literal["clients", "server"] = "clients"
    # betters a shared model that stands already, so what stood before is judged too
    refines: bool = False
    # works on the way that the round's earlier phases have moved the shared model
    follows: bool = False
    # memo groups that an earlier phase of the round must have left
    needs: frozenset[str] = frozenset()
    # memo groups that this phase leaves with the client for later phases
    leaves: frozenset[str] = frozenset()
    keeps: frozenset[str] = frozenset()  # memo groups that stay with the client from round to round
    # (model, state, world) -> groups the state begins with besides
    opens: Callable[[Model, Groups, World], Groups] | None = None
    # likewise -> memo groups every client begins with
    brings: Callable[[Model, Groups, World], Groups] | None = None
    # of what the server gathers, in units of what one client may add to it: for the accountant
    noise: float = 0.0

    @property
    def asks_clients(self) -> bool:
        return self.client is not None and self.at == "clients"


@dataclass(frozen=True)
class Exchange:
    """One entry of a round's plan: repetition `step` of `steps` of phase number `index`.

    Random draws depend on `index`, so phases in which the server is alone with its state do not
    count: with and without them clients read the same batches. `retain` names the memo groups that
    clients must keep afterwards; None means all of them.
    """

    phase: Phase
    index: int = 0
    step: int = 1
    steps: int = 1
    retain: frozenset[str] | None = None

    def rates(self, round: int, like: Tensor) -> dict[str, Tensor]:
        # filled in where they belong: to copy them over would make host and device wait for each
        # other
        return {
            name: torch.full((), rate(round, self.step), dtype=like.dtype, device=like.device)
            for name, rate in self.phase.rates.items()
        }


# Which tensors never leave their client: none; batch norm's running statistics; batch-norm layers
# whole; the whole model.
Private = Literal["none", "statistics", "norm", "model"]


@dataclass(frozen=True, eq=False)
class Method(Spelled):
    """A federated method: its phases, and which tensors stay private, by kind and by name
    ("head.*").
    """

    phases: tuple[Phase, ...]
    private: frozenset[Private] = frozenset({"none"})
    private_patterns: frozenset[str] = frozenset()

    def __or__(self, other: "Method") -> "Method":
        """This method's phases, then the other's.

        Both must be spelled, else the text of the whole would lack a part.
        """
        if bool(self.calls) != bool(other.calls):
            raise InputError(
                "register a method of your own (METHODS.register) before you join it with | to one"
                " that is spelled"
            )
        patterns = self.private_patterns | other.private_patterns
        joined = Method(
            self.phases + other.phases,
            self.private | other.private,
            patterns,
            calls=self.calls + other.calls,
        )
        joined.check_order()
        return joined

    @property
    def personal(self) -> bool:
        """Whether clients have tensors of their own, so that each has a model of its own."""
        return self.private != {"none"} or bool(self.private_patterns)

    def check_order(self) -> None:
        """Each phase finds with the client what it needs, and at the server what it works on."""
        left: set[str] = set()
        for number, phase in enumerate(self.phases):
            if phase.follows and number == 0:
                raise InputError(
                    f"phase {phase.name!r} works on what the round has made of the model so far,"
                    " and nothing comes before it: put a method that trains locally first, as in"
                    f" fedavg() | {self}"
                )
            if missing := phase.needs - left - phase.keeps:
                raise InputError(
                    f"phase {phase.name!r} needs {', '.join(sorted(missing))!r} with the client,"
                    " and no phase before it leaves that there: put a method that trains locally"
                    f" first, as in fedavg() | {self}"
                )
            if (phase.refines or phase.follows) and "model" in self.private:
                does = "teaches" if phase.refines else "moves"
                raise InputError(
                    f"phase {phase.name!r} {does} a shared model, and in {self} whole models stay"
                    " with the clients"
                )
            left |= phase.leaves | phase.keeps

    def fitted(self, model: Model) -> "Method":
        """The same method for this very network: phases that depend on it are unfolded."""
        unfolded = (phase.unfolds(model) if phase.unfolds else (phase,) for phase in self.phases)
        return replace(self, phases=tuple(phase for phases in unfolded for phase in phases))

    def in_stored_order(self, distilling: bool = True) -> "Method":
        """The same method with nobody's examples shuffled; `distilling`, too, or but for phases
        that do.
        """
        return replace(
            self,
            phases=tuple(
                _in_stored_order(p) if distilling or not p.refines else p for p in self.phases
            ),
        )

    def private_names(self, model: Model) -> frozenset[str]:
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
                f"every trained tensor stays with the clients in {self}, so there is no shared"
                " model to work on"
            )
        return private

    def start(
        self, model: Model, params: Tensors, buffers: Tensors, world: World = NOWHERE
    ) -> tuple[Groups, Groups]:
        """An initial model as the server's state and the memo every client begins with (its private
        tensors).
        """
        private = self.private_names(model)
        state: Groups = {"params": without(params, private), "buffers": without(buffers, private)}
        memo: Groups = {"private": only({**params, **buffers}, private)} if private else {}
        like = next((tensor for tensor in params.values()), world.like)
        for number, phase in enumerate(self.fitted(model).phases):
            here = world._replace(key=(*world.key, number), like=like)
            memo = {**memo, **(phase.brings(model, state, here) if phase.brings else {})}
            state = {**state, **(phase.opens(model, state, here) if phase.opens else {})}
        return state, memo

    def plan(self, round: int, wanted: frozenset[str] = frozenset()) -> list[Exchange]:
        """The exchanges of a round, in order.

        Memo groups in `wanted` stay with the clients to its end.
        """
        turns = [
            (i, j, n)
            for i, p in enumerate(self.phases)
            for n in [p.repeat(round)]
            for j in range(1, n + 1)
        ]
        forever = frozenset({"private"}).union(wanted, *(phase.keeps for phase in self.phases))
        needed_later = [
            forever.union(*(self.phases[i].needs for i, _, _ in turns[at + 1 :]))
            for at in range(len(turns))
        ]
        index = list(accumulate((phase.client is not None for phase in self.phases), initial=0))
        return [
            Exchange(self.phases[i], index[i], j, n, keep)
            for (i, j, n), keep in zip(turns, needed_later, strict=True)
        ]


def _matching(pattern: str, model: Model) -> frozenset[str]:
    """Return the tensors that a pattern names; one with several names is meant by any of them."""
    tensors = model.tensors
    found = {
        own
        for name, own in {**tensors.saved, **tensors.slots}.items()
        if fnmatchcase(name, pattern)
    }
    if not found:
        some = sorted(tensors.saved)[:20]
        raise InputError(
            f"no tensor of the network is called {pattern!r}; there are:"
            f" {choices(some)}{', ...' * (len(some) == 20)}"
        )
    if not (kept := frozenset(found) - tensors.constants):
        raise InputError(
            f"{pattern!r} names only tensors that never leave a client anyway: frozen or not saved"
            " in state_dict()"
        )
    return kept


def _in_stored_order(phase: Phase) -> Phase:
    phase = replace(phase, reads=replace(phase.reads, shuffle=False))
    if (unfolds := phase.unfolds) is None:
        return phase
    return replace(phase, unfolds=lambda model: tuple(map(_in_stored_order, unfolds(model))))


def probe_of(targets: Targets, loss: Loss) -> Fold:
    """The loss at the shared weights, as upload["probe"]["loss"]."""

    def start(model: Model, sent: Groups, memo: Groups) -> Groups:
        return {**memo, "probe": {"loss": next(iter(sent["params"].values())).new_zeros(())}}

    def step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        value = loss(model, sent["params"], sent, carry, batch, targets(model, carry, batch))
        return {**carry, "probe": {"loss": value}}

    def finish(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
        return {"probe": carry["probe"]}, memo

    return Fold(start, step, finish)


def probing(phase: Phase) -> Phase | None:
    """The exchange that a gradient's probe amounts to."""
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
    """The model as this client sees it: what was sent, with its private tensors in place."""
    private = memo.get("private", {})
    params = {**sent["params"], **only(private, model.param_names)}
    return params, {**sent["buffers"], **only(private, model.buffer_names)}


def uploads(model: Model, params: Tensors, buffers: Tensors, memo: Groups) -> tuple[Groups, Groups]:
    """Part a client's model into what it uploads and the memo in which its private tensors stay."""
    names = frozenset(memo.get("private", {}))
    upload = {"params": without(params, names), "buffers": without(buffers, names)}
    return upload, {**memo, "private": only({**params, **buffers}, names)} if names else dict(memo)
