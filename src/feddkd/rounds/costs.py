"""Costs of a run so far: communications, local steps, bytes.

A communication is one exchange (FedDKD makes 1 + J a round). Local steps are counted as in the
paper, for the average active client: E ceil(n_k / B) + J a round. Bytes are those of the named
tensors, over all clients, without framing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from feddkd.engines.interface import Order, Reply
from feddkd.method import Collect, Phase
from feddkd.tensors import bytes_of


@dataclass(frozen=True)
class Costs:
    """The costs of a run so far."""

    communications: int = 0
    local_steps: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0

    def after(
        self,
        phase: Phase,
        orders: Sequence[Order],
        replies: Sequence[Reply],
        sizes: Sequence[int],
        active: int,
    ) -> "Costs":
        """Return the costs after one more exchange, which may consist of several orders.

        `sizes` are the numbers of examples of the clients that answered. `active` is the number of
        clients that are still in the round.
        """
        idle = phase.reads.source == "none"  # a step without an example is no step
        steps = 0 if idle else sum(phase.reads.count(n) for n in sizes)
        return Costs(
            self.communications + 1,
            self.local_steps + steps / active,
            self.bytes_up + sum(_uploaded(phase, reply) for reply in replies if not reply.short),
            self.bytes_down + sum(len(order.cohort) * bytes_of(order.sent) for order in orders),
        )


def _uploaded(phase: Phase, reply: Reply) -> int:
    """Return the bytes of all uploads; a mean has the shape of one upload, a stack holds all."""
    if reply.uploaded is not None:
        return reply.uploaded
    copies = {
        group: 1 if rule is Collect.EVERY else len(reply.clients)
        for group, rule in phase.collect.items()
    }
    for name, group in phase.every.items():
        if group not in phase.collect:  # or else it is counted already
            copies[name] = 1
    return sum(n * bytes_of({group: reply.collected[group]}) for group, n in copies.items())
