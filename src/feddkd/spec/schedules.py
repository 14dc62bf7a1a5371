"""Values that change with the round: rates, and the number of repetitions of a phase."""

from collections.abc import Callable
from dataclasses import dataclass

from feddkd.spec.rate_schedules import RateSchedule

# (round t = 1, 2, ..., repetition j = 1, 2, ... of the phase) -> value
Schedule = Callable[[int, int], float]


@dataclass(frozen=True)
class Rate:
    """A rate max(least, initial * per_round^(t-1) * per_step^(j-1)), 0 in the first `after` rounds.

    t is the number of the round, j that of the repetition in the round. `rounds` and `steps` are
    further factors: f_t of `rounds` and f_j of `steps`.
    """

    initial: float
    per_round: float = 1.0
    per_step: float = 1.0
    after: int = 0
    least: float = 0.0
    rounds: RateSchedule | None = None
    steps: RateSchedule | None = None

    def __call__(self, round: int, step: int) -> float:
        if round <= self.after:
            return 0.0
        rate = self.initial * self.per_round ** (round - 1) * self.per_step ** (step - 1)
        if self.rounds is not None:
            rate *= self.rounds.at(round)
        if self.steps is not None:
            rate *= self.steps.at(step)
        return max(self.least, rate)


@dataclass(frozen=True)
class Repeat:
    """The number of repetitions of a phase in a round.

    It is 0 in the first `warmup` rounds and after round `last`, and `times` in the others.
    """

    times: int = 1
    warmup: int = 0
    last: int | None = None

    def __call__(self, round: int) -> int:
        if self.last is not None and round > self.last:
            return 0
        return 0 if round <= self.warmup else self.times

    def total(self, first: int, last: int) -> int:
        """Return the number of repetitions in the rounds `first` to `last`."""
        begin = max(first, self.warmup + 1)
        end = last if self.last is None else min(last, self.last)
        return self.times * max(0, end - begin + 1)


ONCE = Repeat()
