"""A federated method: its phases, and the tensors that clients keep private."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from feddkd.errors import InputError, choices, did_you_mean
from feddkd.method.codec import Codec
from feddkd.method.compression import check_compressible, compressed
from feddkd.method.phases import NOWHERE, Exchange, Phase, World, in_stored_order
from feddkd.method.upload_changes import weights_in
from feddkd.models.functional import Model
from feddkd.spec.registry import Spelled
from feddkd.tasks.task import Offer, Task, check_offers
from feddkd.tensors import Groups, Tensors, only, without

# The tensors that never leave their client: none; the running statistics of batch norm; whole
# batch-norm layers; the last linear layer; all but this layer; the whole model.
Private = Literal["none", "statistics", "norm", "head", "body", "model"]


@dataclass(frozen=True, eq=False)
class Method(Spelled):
    """A federated method: its phases, and the tensors that clients keep private.

    `private` names kinds of tensors, `private_patterns` patterns of names ("head.*"; "!head.*" for
    all tensors but these).
    """

    phases: tuple[Phase, ...]
    private: frozenset[Private] = frozenset({"none"})
    private_patterns: frozenset[str] = frozenset()
    codec: Codec | None = None  # compresses the uploads of all phases
    # changes each phase, before compression; it has no text: a run's attack
    alter: Callable[[Phase], Phase] | None = None

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
        if self.codec and other.codec:
            raise InputError(f"{self} | {other} compresses uploads twice: one way is enough")
        joined = Method(
            self.phases + other.phases,
            self.private | other.private,
            self.private_patterns | other.private_patterns,
            self.codec or other.codec,
            calls=self.calls + other.calls,
        )
        joined.check_order()
        return joined

    @property
    def personal(self) -> bool:
        """Return True if the models that clients are judged by differ."""
        return not self.shares_all or "personal" in self.held

    @property
    def shares_all(self) -> bool:
        """Return True if no tensor of the shared model stays with the clients."""
        return self.private == {"none"} and not self.private_patterns

    @property
    def judging(self) -> Phase | None:
        """Return the phase that clients do before their own models are judged, if there is one."""
        return next((phase for phase in self.phases if phase.at == "judging"), None)

    @property
    def evaluations(self) -> int:
        """Return the number of evaluations in a round: two if a phase refines the shared model."""
        return 2 if any(phase.refines for phase in self.phases) else 1

    @property
    def held(self) -> frozenset[str]:
        """The names of all memo groups that clients may hold."""
        groups = (phase.keeps | phase.leaves | phase.needs for phase in self.phases)
        return frozenset[str]().union({"private"}, *groups)

    @property
    def uploads_weights(self) -> bool:
        """Return True if clients upload models or gradients."""
        return "model" not in self.private and any(map(weights_in, self.phases))

    def check_order(self) -> None:
        """Raise InputError if a phase needs something that no earlier phase leaves."""
        if self.codec and self.phases and not self.uploads_weights:
            raise InputError(f"there is nothing to compress in {self}: clients upload no weights")
        left: set[str] = set()
        self._check_personal()
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
            if self.codec:
                check_compressible(phase)
            left |= phase.leaves | phase.keeps

    def _check_personal(self) -> None:
        """Raise InputError if it is not plain by which model a client is judged."""
        personal = [phase for phase in self.phases if "personal" in phase.keeps]
        if len(personal) > 1:
            raise InputError(
                f"phases {personal[0].name!r} and {personal[1].name!r} each make the personal model"
                f" by which a client is judged; in {self} only one may"
            )
        if not self.shares_all and any(phase.at == "clients" for phase in personal):
            raise InputError(
                f"{self} gives each client a whole model of its own, so it does not go with"
                " private tensors"
            )
        if self.phases and self.phases[0] is self.judging:
            raise InputError(
                f"phase {self.phases[0].name!r} starts from the model of a method: put one that"
                f" trains locally first, as in fedavg() | {self}"
            )

    def check_task(self, task: Task) -> None:
        """Raise InputError if a phase needs what the task does not offer."""
        needed = frozenset[Offer]().union(*(phase.requires for phase in self.phases))
        check_offers(task, needed, repr(self))

    def fitted(self, model: Model) -> "Method":
        """Return the method for this network: phases that depend on the network are replaced."""
        phases: list[Phase] = []
        for phase in self.phases:
            phases += phase.unfolds(model) if phase.unfolds else (phase,)
        if self.alter:
            phases = [self.alter(phase) for phase in phases]
        if self.codec:
            phases = [compressed(phase, n, self.codec) for n, phase in enumerate(phases)]
        return replace(self, phases=tuple(phases), codec=None, alter=None)

    def in_stored_order(self, distilling: bool = True) -> "Method":
        """Return the method without shuffling of examples.

        With distilling=False the phases that refine a model still shuffle.
        """
        phases = (
            in_stored_order(phase) if distilling or not phase.refines else phase
            for phase in self.phases
        )
        return replace(self, phases=tuple(phases))

    def private_names(self, model: Model) -> frozenset[str]:
        """Return the names of the network's tensors that stay with the clients."""
        kinds = frozenset[str]().union(*(_of_kind(kind, model) for kind in self.private))
        private = kinds | matching(self.private_patterns, model)
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
        phases = [phase for phase in self.phases if phase.at != "judging"]
        index = sum(phase.client is not None for phase in phases)
        exchanges: list[Exchange] = []
        for phase in reversed(phases):  # backwards: `retain` is what later exchanges need
            index -= phase.client is not None
            steps = phase.repeat(round)
            for step in range(steps, 0, -1):
                exchanges.append(Exchange(phase, index, step, steps, retain))
                retain |= phase.needs
        return exchanges[::-1]


def _of_kind(kind: Private, model: Model) -> frozenset[str]:
    """Return the names of a network's tensors of one kind."""
    everything = model.param_names | model.buffer_names
    if kind in ("head", "body"):
        return model.head_names if kind == "head" else everything - model.head_names
    names = {
        "none": frozenset[str](),
        "statistics": model.buffer_names & model.norm_names,
        "norm": model.norm_names,
        "model": everything,
    }
    return names[kind]


def matching(patterns: Iterable[str], model: Model) -> frozenset[str]:
    """Return the names of a network's tensors that patterns list; "!..." lists all but these."""
    listed, others = set[str](), set[str]()
    for pattern in patterns:
        (others if pattern.startswith("!") else listed).update(
            _matching(pattern.removeprefix("!"), model)
        )
    everything = model.param_names | model.buffer_names
    return frozenset(listed | (everything - others if others else set()))


def _matching(pattern: str, model: Model) -> frozenset[str]:
    """Return the tensors that a pattern names. Any name of a tensor with several names counts."""
    tensors = model.tensors
    names = {**tensors.saved, **tensors.slots}
    matching = frozenset(names[name] for name in names if fnmatchcase(name, pattern))
    if not matching:
        some = sorted(tensors.saved)[:20]
        more = ", ..." if len(some) == 20 else ""
        hint = did_you_mean(pattern, names)
        raise InputError(
            f"no tensor of the network is called {pattern!r}{hint}; there are:"
            f" {choices(some)}{more}"
        )
    if matching <= tensors.constants:
        raise InputError(
            f"{pattern!r} names only tensors that never leave a client: frozen tensors, or tensors"
            " that state_dict() does not save"
        )
    return matching - tensors.constants
