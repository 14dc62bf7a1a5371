"""The choice of a strategy for each kind of work, made while the work goes on.

The work begins at once with the strategy that needs no preparation. The others are tried one at a
time, between exchanges or between the steps of a long one: a trial computes some of the present
steps again and throws the results away. The trials of a kind of work take at most a tenth of the
time that this kind has taken so far.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from feddkd.engines.choice_cache import keep_choice, kept_choice

# of the time so far, for trials: with errors of the expected costs it is at most a tenth
SHARE = 0.08
AT_ONCE = 0.1  # seconds that the preparation of a known strategy may take before the first step
TRIAL_SECONDS = 0.01  # the aim for one timing: many steps if they are short
LONGEST_REPEATED = 0.3  # seconds; a longer step is timed once
REPEATS = 3
TOO_SLOW = 3.0  # a strategy that takes this many times as long as the present one is timed once
BETTER = 0.95  # a new strategy must take less than this part of the present one's time
# What a trial is expected to take, until one has been measured: seconds, and steps of the
# unprepared program. A trace takes as long as about 150 steps, for large networks as for small.
EXPECTED = {
    "loop": (0.0, 20.0),
    "vmap": (0.0, 20.0),  # it may be this many times as slow as the loop
    "traced": (0.05, 150.0),
    "graph": (0.3, 30.0),
    "streams": (0.5, 60.0),
    "fused": (5.0, 2500.0),
    "fused-streams": (5.0, 2500.0),
    "kernels": (10.0, 4000.0),
}
Time = Callable[[str, int], float]  # (strategy, steps) -> seconds of a step, measured


@dataclass
class Choice:
    """What is known of one kind of work."""

    digest: str  # names the kind in the cache
    name: str  # the present strategy
    known: str | None = None  # the best one by the cache, if it is another one
    seconds: dict[str, float] = field(default_factory=dict)  # strategy -> seconds of a step
    costs: dict[str, float] = field(default_factory=dict)  # strategy -> seconds of its trial
    tried: set[str] = field(default_factory=set)
    spent: float = 0.0  # seconds of this work so far
    trials: float = 0.0  # seconds of all trials so far
    since: list[tuple[int, str]] = field(default_factory=list)  # (round, strategy from there on)

    @classmethod
    def first(cls, digest: str, names: Sequence[str], start: str) -> "Choice":
        """Return the choice for work that has not begun: what the cache knows, or the start."""
        found = kept_choice(digest)
        best = found.get("strategy")
        choice = cls(digest, start, seconds=found.get("seconds", {}), costs=found.get("costs", {}))
        if best in names:
            choice.tried |= {name for name in names if name in choice.costs}
            choice.known = None if best == start else best
        return choice

    def left(self, names: Sequence[str]) -> list[str]:
        """Return the strategies that have not been tried."""
        return [name for name in names if name != self.name and name not in self.tried]

    def due(self, names: Sequence[str]) -> str | None:
        """Return the strategy to try now: the cheapest one, if it is not too expensive yet."""
        if self.name not in self.seconds:  # nothing has run yet
            return None
        costs = {name: self.cost(name) for name in self.left(names)}
        name = min(costs, key=lambda name: costs[name], default=None)
        if name is None or self.trials + costs[name] > SHARE * self.spent:
            return None
        return name

    def cost(self, name: str) -> float:
        """Return the seconds that a trial is expected to take."""
        if name in self.costs:
            return self.costs[name]
        fixed, steps = EXPECTED[name]
        present = self.seconds[self.name]
        base = self.seconds.get("vmap", present)
        return fixed + steps * base + 2 * REPEATS * max(present, TRIAL_SECONDS)

    def is_known_due(self) -> bool:
        """Return whether the strategy of the cache has come: its preparation pays for itself."""
        return self.known is not None and self.costs.get(self.known, 0) <= self.spent + AT_ONCE

    def compare(self, name: str, time: Time, most: int, prepared: bool) -> None:
        """Time a strategy and the present one in turns, and keep the faster one.

        The turns make other load on the machine slow both alike. A timing has at most `most` steps.
        """
        self.tried |= {name, self.name}
        first = time(name, 1)
        if prepared:  # the first step is no measure: it was recorded or traced
            first = time(name, 1)
        if first < TOO_SLOW * self.seconds[self.name]:
            now = {self.name: float("inf"), name: float("inf")}
            steps = max(1, min(most, round(TRIAL_SECONDS / self.seconds[self.name])))
            repeats = 1 if self.seconds[self.name] > LONGEST_REPEATED else REPEATS
            for _ in range(repeats):
                for each in now:
                    now[each] = min(now[each], time(each, steps))
            self.seconds |= now
        else:
            self.seconds[name] = first

    def faster(self, name: str) -> bool:
        """Return whether a strategy was clearly faster than the present one."""
        return self.seconds[name] < BETTER * self.seconds[self.name]

    def ran(self, seconds: float, steps: float) -> None:
        """Count the time of some steps by the present strategy."""
        self.spent += seconds
        before = self.seconds.get(self.name, float("inf"))
        self.seconds[self.name] = min(before, seconds / steps)

    def switch(self, name: str, round: int) -> None:
        """Use a strategy from now on."""
        self.name, self.known = name, None
        self.tried.add(name)
        self.since.append((round, name))

    def keep(self) -> None:
        """Write what is known to the cache, if a trial has taught something."""
        if self.tried:
            best = self.known or self.name
            known = {"strategy": best, "seconds": self.seconds, "costs": self.costs}
            keep_choice(self.digest, known)


def adopted(name: str, tried: Mapping[str, Any] | None, names: Sequence[str]) -> Choice:
    """Return the choice that a record names; by an old record no trials are left."""
    done = names if tried is None else tried
    return Choice("", name, tried={*done, name}, seconds={} if tried is None else dict(tried))
