"""The laws that any method obeys, each a function that raises LawError where it is broken."""

import functools
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from feddkd.errors import InputError
from feddkd.method import Method
from feddkd.methods import parse
from feddkd.tensors import Groups
from feddkd.testing.probes import Counting, FallsSilent, Unseeded, guarded, watched
from feddkd.testing.rehearsal import Network, Played, first_weights, rehearse

TOLERANCE = 1e-12
WAYS: list[dict[str, Any]] = [
    {"engine": "batched", "strategy": "vmap"},
    {"engine": "batched", "strategy": "vmap", "lanes": 2},
    {"engine": "batched", "strategy": "vmap", "around": FallsSilent(1)},
    {"engine": "batched", "strategy": "loop"},
    # tracing takes long: with everybody shapes stay the same
    {"engine": "batched", "strategy": "traced", "cohort": 4},
    *([{"engine": "pool", "workers": 2}] if hasattr(os, "memfd_create") else []),
]


class LawError(AssertionError):
    """A method breaks a law; the message says which, and how to see it again."""

    def __init__(self, law: str, sentence: str) -> None:
        super().__init__(f"{law}: {sentence}")
        self.law = law


@dataclass(frozen=True)
class Trial:
    """A method on one of the networks, under one law."""

    method: Method
    network: Network
    law: str

    def play(self, what: str, **how: Any) -> Played:
        """A rehearsal. Whatever goes wrong in it breaks the law, and so does a number that is none."""
        try:
            played = rehearse(**{"method": self.method, "network": self.network, **how})
        except LawError:
            raise
        except Exception as error:
            raise LawError(self.law, f"{what} fails: {error}{self.again(how)}") from error
        for path, number in _numbers(played):
            self.hold(
                bool(torch.isfinite(number).all()),
                f"{what} gives numbers that are not finite in {path}",
                how,
            )
        return played

    def hold(self, holds: bool, otherwise: str, how: dict[str, Any] | None = None) -> None:
        if not holds:
            raise LawError(self.law, otherwise + self.again(how or {}))

    def agree(
        self,
        what: str,
        expected: Played,
        found: Played,
        tolerance: float,
        how: dict[str, Any] | None = None,
    ) -> None:
        """Two rehearsals give the same numbers; `tolerance` counts for numbers of about one."""
        ours, theirs = dict(_numbers(expected)), dict(_numbers(found))
        self.hold(
            set(ours) == set(theirs),
            f"{what}: only one of them has {sorted(set(ours) ^ set(theirs))[:3]}",
            how,
        )
        for path, number in ours.items():
            gap = _apart(number, theirs[path])
            self.hold(gap <= tolerance, f"{what}: {path} differs by {gap:.1e}", how)

    def again(self, how: dict[str, Any]) -> str:
        options = {
            key: value
            for key, value in how.items()
            if isinstance(value, str | int | tuple | FallsSilent)
        }
        method = repr(str(self.method)) if self.method.calls else "method"
        written = ", ".join(
            [
                method,
                f"network={self.network!r}",
                *(f"{key}={value!r}" for key, value in options.items()),
            ]
        )
        return f"\nto see it again: feddkd.testing.rehearse({written})"


def _numbers(played: Played) -> Iterator[tuple[str, Tensor]]:
    """Everything in which two rehearsals can differ, by name."""
    groups: list[tuple[str, Groups]] = [
        (f"state of run {at}", state) for at, state in enumerate(played.states)
    ]
    groups += [
        (f"memo of client {client} of run {run}", memo)
        for (run, client), memo in sorted(played.memos.items())
    ]
    for place, held in groups:
        for group, tensors in held.items():
            for name, tensor in tensors.items():
                yield f"{place}, {group}[{name!r}]", tensor.double()
    for at, row in enumerate(played.rows):
        for key, value in row.items():
            if isinstance(value, int | float):
                yield f"{key} of run {at}", torch.tensor(float(value), dtype=torch.float64)


def _apart(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    return float(((a - b).abs() / a.abs().clamp(min=1)).max()) if a.numel() else 0.0


def _alone(played: Played, run: int) -> Played:
    """One run of several."""
    memos = {(0, client): memo for (at, client), memo in played.memos.items() if at == run}
    return Played([played.states[run]], memos, [played.rows[run]])


# --- the laws


def mutates_nothing(trial: Trial) -> None:
    """Its functions change no tensor and no mapping that they are given."""

    def complain(what: str) -> None:
        raise LawError(trial.law, f"{what}; make a new tensor in its place")

    trial.play("a run", dress=lambda method: guarded(method, complain), rounds=2)


def respects_keys(trial: Trial) -> None:
    """Its numbers follow from the seed alone: not from global generators, nor from runs before it
    or beside it.
    """
    with _generators(1) as consumed:
        first = trial.play("a run", engine=Unseeded, rounds=2)
        trial.hold(
            not consumed(),
            "it draws from a global generator of torch, numpy or Python; draw by batch.key or"
            " world.key",
        )
    with _generators(2):
        again = trial.play("a run", engine=Unseeded, rounds=2)
        trial.agree(
            "two runs with one seed, with global generators in different states", first, again, 0.0
        )
    beside = trial.play("a run beside others", rounds=2, seeds=(1, 0, 2), worlds=(0, 0, 0))
    trial.agree("a run by itself and beside others", first, _alone(beside, 1), 0.0)
    numbers = [dict(_numbers(_alone(beside, at)._replace(rows=[]))) for at in (0, 1)]
    same = numbers[0].keys() == numbers[1].keys() and all(
        torch.equal(numbers[0][path], numbers[1][path]) for path in numbers[0]
    )
    trial.hold(not same, "another seed gives the same numbers", {"seeds": (0, 1), "worlds": (0, 0)})


@contextmanager
def _generators(seed: int) -> Iterator[Any]:
    """Global generators in a state of this seed's; they are put back.

    Yields whether they have been drawn from.
    """

    def states() -> list[Any]:
        return [torch.get_rng_state().tolist(), repr(np.random.get_state()), random.getstate()]

    kept = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            before = states()
            yield lambda: states() != before
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])


def reads_back(trial: Trial) -> None:
    """Its text, read again, is the same method: the same text and the same numbers."""
    text = str(trial.method)
    try:
        again, canonical = parse(text), parse(trial.method.canonical)
    except InputError as error:
        raise LawError(trial.law, f"its text {text!r} cannot be read: {error}") from error
    trial.hold(str(again) == text, f"its text {text!r} comes back as {str(again)!r}")
    trial.hold(
        again.canonical == canonical.canonical == trial.method.canonical,
        f"{text!r} does not mean what it says",
    )
    ours, theirs = (
        trial.play("a run", rounds=1),
        trial.play("a run of its text", method=again, rounds=1),
    )
    trial.agree(f"the method and its text {text!r}", ours, theirs, 0.0)


def reports_its_bytes(trial: Trial) -> None:
    """What is counted is what travels."""
    counting: list[Counting] = []

    def counts(*given: Any) -> Counting:
        counting.append(Counting(*given))
        return counting[0]

    played = trial.play("a run", engine=counts, rounds=2)
    for cost, total in counting[0].totals.items():
        told = played.rows[0][cost]
        hint = (
            "; every group that is uploaded must be in `collect` or `every`"
            if cost == "bytes_up"
            else ""
        )
        trial.hold(
            told == total, f"{cost} are reported as {told}, and it is {total} that travel{hint}"
        )


def survives_partial_cohorts(trial: Trial) -> None:
    """It goes on with any cohort, and with one that loses a client before or between the exchanges
    of a round.
    """
    for cohort in (1, 4):
        trial.play(f"a cohort of {cohort} out of 4", cohort=cohort, rounds=2)
    for after in (0, 1):
        what = f"a round in which a client answers {after} exchanges and falls silent"
        trial.play(what, around=FallsSilent(after), rounds=2)


def agrees_on_all_engines(trial: Trial) -> None:
    """Engines agree with serial in float64 to 1e-12 after three rounds, and several seeds at once
    with each by itself.
    """
    serial = functools.cache(lambda **rounds: trial.play("a run", **rounds))
    for how in WAYS:
        # tracing takes long, batch norm or not
        if how.get("strategy") == "traced" and trial.network != "plain":
            continue
        title = " ".join(str(value) for key, value in how.items() if key in ("engine", "strategy"))
        rounds = {key: value for key, value in how.items() if key in ("cohort", "around")}
        trial.agree(
            f"serial and {title}", serial(**rounds), trial.play(title, **how), TOLERANCE, how
        )
    how = {"engine": "batched", "strategy": "vmap", "seeds": (1, 0)}
    together = trial.play("two seeds at once", **how)
    for at, alone in enumerate((serial(seeds=(1,)), serial())):
        trial.agree(
            "two seeds at once and each by itself", alone, _alone(together, at), TOLERANCE, how
        )


def reports_what_it_trains(trial: Trial) -> None:
    """The model that is judged holds what clients have trained: no tensor of it is left as it was
    at the beginning.
    """
    moved: set[str] = set()
    played = trial.play("a run", dress=lambda method: watched(method, moved), rounds=2, cohort=4)
    first = first_weights(trial.network)
    for name in sorted(moved & first.keys()):
        reported = [
            {**played.states[0]["params"], **memo.get("private", {})}.get(name)
            for memo in played.memos.values()
        ]
        left = [
            tensor is None
            or (tensor.shape == first[name].shape and torch.equal(tensor, first[name]))
            for tensor in reported
        ]
        trial.hold(
            not all(left),
            f"clients train {name!r}, and in the model that is judged it is still as it was at the"
            " beginning: upload it, or let Method.private or Method.private_patterns name it",
        )


# The order matters: what breaks one law may show in those below it, too.
LAWS = {
    "mutates nothing": mutates_nothing,
    "respects keys": respects_keys,
    "reads back from its text": reads_back,
    "reports its bytes": reports_its_bytes,
    "survives partial cohorts": survives_partial_cohorts,
    "reports what it trains": reports_what_it_trains,
    "agrees on all engines": agrees_on_all_engines,
}
