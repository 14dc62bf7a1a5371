"""Counts of failures by node: a node that fails repeatedly is left out for some rounds."""

import logging
from dataclasses import dataclass, field

log = logging.getLogger(__name__)
MOST_FAILURES = 3  # one after another
ROUNDS_ASIDE = 3


@dataclass
class Conduct:
    """Counts the failures of nodes, one after another, and puts nodes aside for some rounds.

    A failure is an answer that cannot be used, or none before the deadline. A node that answers
    well again is forgiven. Each time that a node is put aside lasts twice as long as the last.
    """

    failures: dict[int, int] = field(default_factory=dict)  # by node; of all rounds
    _in_a_row: dict[int, int] = field(default_factory=dict)
    _until: dict[int, int] = field(default_factory=dict)  # node -> the first round it is asked in
    _times: dict[int, int] = field(default_factory=dict)  # node -> how often it was put aside
    _last: dict[int, int] = field(default_factory=dict)  # node -> the round of its last failure

    def failed(self, node: int, round: int) -> None:
        """Count a failure of a node in a round."""
        self.failures[node] = self.failures.get(node, 0) + 1
        self._last[node] = round
        self._in_a_row[node] = self._in_a_row.get(node, 0) + 1
        if self._in_a_row[node] >= MOST_FAILURES:
            self.put_aside(node, round, f"has failed {MOST_FAILURES} times in a row")

    def put_aside(self, node: int, round: int, why: str) -> None:
        """Ask a node no more for some rounds."""
        self._in_a_row[node] = 0
        rounds = ROUNDS_ASIDE << min(self._times.get(node, 0), 16)
        self._times[node] = self._times.get(node, 0) + 1
        self._until[node] = round + 1 + rounds
        log.warning("node %s %s; it is not asked before round %s", node, why, self._until[node])

    def did_well(self, node: int) -> None:
        """Forget the failures in a row of a node that has answered well."""
        self._in_a_row.pop(node, None)

    def has_failed(self, node: int, round: int) -> bool:
        """Return whether a node has failed in a round, or is not asked in it."""
        return self._last.get(node) == round or self.is_aside(node, round)

    def is_aside(self, node: int, round: int) -> bool:
        """Return whether a node is not asked in a round."""
        return round < self._until.get(node, 0)
