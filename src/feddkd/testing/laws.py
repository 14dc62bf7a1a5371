"""The laws that every method obeys; each is a function that raises LawError if it is broken."""

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
from feddkd.method import Method, own_tensors
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
    # Tracing is slow; with the whole cohort the shapes stay the same.
    {"engine": "batched", "strategy": "traced", "cohort": 4},
    *([{"engine": "pool", "workers": 2}] if hasattr(os, "memfd_create") else []),
]


class LawError(AssertionError):
    """A method breaks a law; the message says which one, and how to repeat it."""

    def __init__(self, law: str, sentence: str) -> None:
        super().__init__(f"{law}: {sentence}")
        self.law = law


@dataclass(frozen=True)
class Trial:
    """A method on one of the networks, checked against one law."""

    method: Method
    network: Network
    law: str

    def play(self, what: str, **how: Any) -> Played:
        """Play a rehearsal, or raise LawError if it fails or gives numbers that are not finite."""
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
        """Raise LawError with the message `otherwise` if a condition does not hold."""
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
        """Raise LawError if two rehearsals give different numbers.

        `tolerance` is relative for numbers above 1, and absolute below.
        """
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
        """Return the call that repeats a rehearsal."""
        method = repr(str(self.method)) if self.method.calls else "method"
        arguments = [method, f"network={self.network!r}"]
        for key, value in how.items():
            if isinstance(value, str | int | tuple | FallsSilent):
                arguments.append(f"{key}={value!r}")
        return f"\nto repeat it: feddkd.testing.rehearse({', '.join(arguments)})"


def _numbers(played: Played) -> Iterator[tuple[str, Tensor]]:
    """Yield all numbers of a rehearsal with their names."""
    parts: list[tuple[str, Groups]] = [
        (f"state of run {run}", state) for run, state in enumerate(played.states)
    ]
    parts += [
        (f"memo of client {client} of run {run}", memo)
        for (run, client), memo in sorted(played.memos.items())
    ]
    for part, groups in parts:
        for group, tensors in groups.items():
            for name, tensor in tensors.items():
                yield f"{part}, {group}[{name!r}]", tensor.double()
    for run, row in enumerate(played.rows):
        for key, value in row.items():
            if isinstance(value, int | float):
                yield f"{key} of run {run}", torch.tensor(float(value), dtype=torch.float64)


def _apart(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    return float(((a - b).abs() / a.abs().clamp(min=1)).max()) if a.numel() else 0.0


def _alone(played: Played, run: int) -> Played:
    """Return one run of several as a rehearsal."""
    memos = {(0, client): memo for (number, client), memo in played.memos.items() if number == run}
    return Played([played.states[run]], memos, [played.rows[run]])


# --- the laws


def mutates_nothing(trial: Trial) -> None:
    """Check that the method's functions change no tensor and no mapping among their arguments."""

    def report(change: str) -> None:
        raise LawError(trial.law, f"{change}; make a new tensor instead")

    trial.play("a run", dress=lambda method: guarded(method, report), rounds=2)


def respects_keys(trial: Trial) -> None:
    """Check that the numbers depend only on the seed, not on global generators or other runs."""
    with _generators(1) as consumed:
        first = trial.play("a run", engine=Unseeded, rounds=2)
        trial.hold(
            not consumed(),
            "it draws from a global generator of torch, numpy or Python; use batch.key or"
            " world.key for its draws",
        )
    with _generators(2):
        again = trial.play("a run", engine=Unseeded, rounds=2)
        trial.agree(
            "two runs with one seed, with global generators in different states", first, again, 0.0
        )
    together = trial.play("a run with others", rounds=2, seeds=(1, 0, 2), worlds=(0, 0, 0))
    trial.agree("a run alone and a run with others", first, _alone(together, 1), 0.0)
    numbers = [dict(_numbers(_alone(together, run)._replace(rows=[]))) for run in (0, 1)]
    same = numbers[0].keys() == numbers[1].keys() and all(
        torch.equal(numbers[0][path], numbers[1][path]) for path in numbers[0]
    )
    trial.hold(not same, "another seed gives the same numbers", {"seeds": (0, 1), "worlds": (0, 0)})


@contextmanager
def _generators(seed: int) -> Iterator[Any]:
    """Seed the global generators and restore them at the end.

    Yields a function that tells whether they were drawn from.
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
    """Check that the method's text, read again, gives the same text and the same numbers."""
    text = str(trial.method)
    try:
        again, canonical = parse(text), parse(trial.method.canonical)
    except InputError as error:
        raise LawError(trial.law, f"its text {text!r} cannot be read: {error}") from error
    trial.hold(str(again) == text, f"its text {text!r} comes back as {str(again)!r}")
    trial.hold(
        again.canonical == canonical.canonical == trial.method.canonical,
        f"{text!r} does not mean the same method when it is read again",
    )
    ours = trial.play("a run", rounds=1)
    theirs = trial.play("a run of its text", method=again, rounds=1)
    trial.agree(f"the method and its text {text!r}", ours, theirs, 0.0)


def reports_its_bytes(trial: Trial) -> None:
    """Check that the reported costs are the bytes that are really sent."""
    counting: list[Counting] = []

    def counts(*given: Any) -> Counting:
        counting.append(Counting(*given))
        return counting[0]

    played = trial.play("a run", engine=counts, rounds=2)
    for cost, total in counting[0].totals.items():
        reported, hint = played.rows[0][cost], ""
        if cost == "bytes_up":
            hint = "; every group that is uploaded must be in `collect` or `every`"
        trial.hold(
            reported == total, f"{cost} is reported as {reported}, but {total} are sent{hint}"
        )


def survives_partial_cohorts(trial: Trial) -> None:
    """Check that the method works with any cohort, also if a client stops answering in a round."""
    for cohort in (1, 4):
        trial.play(f"a cohort of {cohort} out of 4", cohort=cohort, rounds=2)
    for after in (0, 1):
        what = f"a round in which a client answers {after} exchanges and then stops"
        trial.play(what, around=FallsSilent(after), rounds=2)


def agrees_on_all_engines(trial: Trial) -> None:
    """Check that all engines give serial's numbers in float64 to 1e-12 after three rounds.

    Also check that several seeds at once give the numbers of each seed alone.
    """
    serial = functools.cache(lambda **rounds: trial.play("a run", **rounds))
    for how in WAYS:
        # tracing is slow, so one network must do
        if how.get("strategy") == "traced" and trial.network != "plain":
            continue
        title = " ".join(str(value) for key, value in how.items() if key in ("engine", "strategy"))
        rounds = {key: value for key, value in how.items() if key in ("cohort", "around")}
        trial.agree(
            f"serial and {title}", serial(**rounds), trial.play(title, **how), TOLERANCE, how
        )
    how = {"engine": "batched", "strategy": "vmap", "seeds": (1, 0)}
    together = trial.play("two seeds at once", **how)
    for run, alone in enumerate((serial(seeds=(1,)), serial())):
        trial.agree(
            "two seeds at once and each alone", alone, _alone(together, run), TOLERANCE, how
        )


def reports_what_it_trains(trial: Trial) -> None:
    """Check that the evaluated model holds every tensor that clients have trained."""
    moved: set[str] = set()
    played = trial.play("a run", dress=lambda method: watched(method, moved), rounds=2, cohort=4)
    first = first_weights(trial.network)
    for name in sorted(moved & first.keys()):
        reported = [
            {**played.states[0]["params"], **own_tensors(memo)}.get(name)
            for memo in played.memos.values()
        ]
        left = [
            tensor is None
            or (tensor.shape == first[name].shape and torch.equal(tensor, first[name]))
            for tensor in reported
        ]
        trial.hold(
            not all(left),
            f"clients train {name!r}, but the evaluated model still has its first value: upload"
            " it, or let Method.private or Method.private_patterns name it",
        )


# The order matters: a method that breaks one law often breaks those below it, too.
LAWS = {
    "mutates nothing": mutates_nothing,
    "respects keys": respects_keys,
    "reads back from its text": reads_back,
    "reports its bytes": reports_its_bytes,
    "survives partial cohorts": survives_partial_cohorts,
    "reports what it trains": reports_what_it_trains,
    "agrees on all engines": agrees_on_all_engines,
}
