"""The value `Attack`, the choice of malicious clients, and where an attack takes place.

An attack on data changes the training examples of malicious clients before the run begins. An
attack on uploads changes what they upload in every exchange, after their own computation and before
compression; a bound that a method sets (clip) is enforced after it. A client knows by its memo that
it is malicious, so both take place where the client computes, on every engine and on Flower nodes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from feddkd.data.federation import Federation
from feddkd.errors import InputError, choices
from feddkd.method import Gradient, Method, Phase, World
from feddkd.method.upload_changes import moved, moves, weights_in, with_change
from feddkd.methods.aggregation import clipped
from feddkd.models.functional import Model
from feddkd.randomness import Key, generator
from feddkd.spec.number_lists import numbers_in
from feddkd.spec.registry import Registry, Spelled
from feddkd.spec.types import Share
from feddkd.tasks.task import Task, check_offers
from feddkd.tensors import Groups, Tensors, combine

MALICIOUS = "malicious"  # memo group: "on" is 1 at malicious clients, 0 at the others


@dataclass(frozen=True, kw_only=True)
class Malicious:
    """Options that say who is malicious: a share of the clients, drawn by the seed, or a list."""

    share: Share = 0.2
    clients: str = ""  # "0, 3-5"; replaces `share`

    def among(self, clients: int, seed: int) -> list[int]:
        """Return the malicious clients, in order; raise InputError if there is no such client."""
        if not self.clients:
            count = int(self.share * clients + 1e-9)
            drawn = generator(("malicious", seed)).choice(clients, size=count, replace=False)
            return sorted(int(client) for client in drawn)
        listed = sorted(numbers_in(self.clients, "attack: clients"))
        if listed[-1] >= clients:
            raise InputError(
                f"attack: there is no client {listed[-1]}; clients have numbers from 0 to"
                f" {clients - 1}"
            )
        return listed


@dataclass(frozen=True, eq=False)
class Attack(Spelled):
    """The actions of malicious clients. None stands for no action of that kind."""

    who: Malicious | None = None  # None: no client is malicious
    # (federation, malicious clients, key) -> federation with other training examples for them
    data: Callable[[Federation, list[int], Key], Federation] | None = None
    # (update, key) -> the update that is sent in its place
    upload: Callable[[Tensors, Tensor], dict[str, Tensor]] | None = None
    # (federation) -> federation whose test examples call for the attacker's aim, if it has one
    aim: Callable[[Federation], Federation] | None = None

    def check_fits(self, method: Method, task: Task, clients: int) -> None:
        """Raise InputError if the attack does not go with a part of the run."""
        if self.who is not None:
            self.who.among(clients, 0)
        if self.data is not None:
            check_offers(task, frozenset({"classes"}), f"attack {self}")
        if self.upload is not None:
            _check_uploads(self, method)

    def on(self, method: Method) -> Method:
        """Return the method with attacked uploads."""
        upload = self.upload
        if upload is None:
            return method
        return replace(method, alter=lambda phase: _attacked(phase, upload))

    def malicious(self, clients: int, seed: int) -> list[int]:
        """Return the malicious clients, in order."""
        return [] if self.who is None else self.who.among(clients, seed)

    def federation(self, federation: Federation, seed: int) -> Federation:
        """Return the federation with the training examples that malicious clients read."""
        if self.data is None:
            return federation
        malicious = self.malicious(len(federation.train), seed)
        return self.data(federation, malicious, ("attack", seed))

    def aims(self, federations: Sequence[Federation]) -> list[Federation]:
        """Return the federations with test examples that call for the aim; none without an aim."""
        return [] if self.aim is None else [self.aim(federation) for federation in federations]

    def first_memos(self, memo: Groups, clients: int, seed: int) -> Mapping[int, Groups]:
        """Return the first memos of the malicious clients, if they differ from `memo`."""
        if self.upload is None:
            return {}
        mark = {MALICIOUS: combine(torch.ones_like, memo[MALICIOUS])}
        return {client: {**memo, **mark} for client in self.malicious(clients, seed)}


ATTACKS: Registry[Attack] = Registry("attack", "feddkd.attacks")


def find_attack(given: object) -> Attack:
    """Return an attack by its text; raise InputError if there is none."""
    if isinstance(given, Attack):
        return given
    if not isinstance(given, str):
        raise InputError(
            f"attack must be a text, such as 'sign_flip(share=0.2)', not {type(given).__name__};"
            f" there are: {choices(ATTACKS)}"
        )
    return ATTACKS.one(given)


@ATTACKS.register
def none() -> Attack:
    """All clients are honest."""
    return Attack()


NO_ATTACK = none()


def _check_uploads(attack: Attack, method: Method) -> None:
    if not method.uploads_weights:
        raise InputError(f"attack {attack} changes models and gradients, and {method} uploads none")
    for phase in filter(weights_in, method.phases):
        if phase.unfolds is not None:
            raise InputError(
                f"attack {attack} does not go with phase {phase.name!r}, whose layers change their"
                " shapes"
            )
        if isinstance(phase.client, Gradient) and phase.client.probe is not None:
            raise InputError(f"attack {attack} does not go with steps='auto': give a number")


def _attacked(phase: Phase, attack: Callable[[Tensors, Tensor], dict[str, Tensor]]) -> Phase:
    """Return the phase in which clients attack whose memo says so."""
    if not weights_in(phase):
        return replace(phase, keeps=phase.keeps | {MALICIOUS})

    def change(upload: Groups, sent: Groups, memo: Groups, key: Tensor) -> tuple[Groups, Groups]:
        lies = {group: attack(move, key) for group, move in moves(upload, sent).items()}
        bad: Groups = {**upload, **moved(sent, lies)}
        if phase.clip is not None:
            bad = clipped(bad, sent, phase.clip, hidden=phase.noise > 0)
        lying = memo[MALICIOUS]["on"] > 0

        def chosen(honest: Tensor, lie: Tensor) -> Tensor:
            return torch.where(lying, lie, honest)

        return {group: combine(chosen, upload[group], bad[group]) for group in upload}, memo

    def brings(model: Model, state: Groups, world: World) -> Groups:
        others = phase.brings(model, state, world) if phase.brings else {}
        return {**others, MALICIOUS: {"on": world.like.new_zeros(())}}

    return replace(with_change(phase, change), brings=brings, keeps=phase.keeps | {MALICIOUS})
