"""The rule by which rounds and clients are evaluated, for runs in which evaluation dominates."""

from dataclasses import dataclass

from feddkd.randomness import generator


@dataclass(frozen=True)
class Judging:
    """The rounds and the clients that evaluations take.

    The first and the last round are always evaluated. The clients are the same in all rounds, runs
    and seeds, so that curves and methods can be compared.
    """

    every: int = 1  # of this many rounds one is evaluated
    clients: int | float = 1.0  # how many clients are evaluated, or which share of them
    among: frozenset[int] | None = None  # of those, only the ones that are in it; None: all

    def is_due(self, round: int, last: int) -> bool:
        """Return True if a round is evaluated, where `last` is the last one."""
        return round in (1, last) or round % self.every == 0

    def chosen(self, clients: int) -> tuple[int, ...]:
        """Return the clients that are evaluated, in order."""
        drawn = self._drawn(clients)
        return tuple(k for k in drawn if self.among is None or k in self.among)

    def _drawn(self, clients: int) -> tuple[int, ...]:
        wanted = self.clients if isinstance(self.clients, int) else round(self.clients * clients)
        if wanted >= clients:
            return tuple(range(clients))
        drawn = generator(("evaluated",)).choice(clients, size=max(wanted, 1), replace=False)
        return tuple(sorted(drawn.tolist()))


ALWAYS = Judging()
