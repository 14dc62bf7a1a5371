"""What a run has cost so far: communications, local steps, bytes.

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
        """The costs with one more exchange of a run added, however many orders it went out in.
        `sizes` are the numbers of examples that those who answered read from; `active` counts the
        clients still in the round, asked or not.
        """
        return Costs(
            self.communications + 1,
            self.local_steps + sum(phase.reads.count(n) for n in sizes) / active,
            self.bytes_up + sum(_uploaded(phase, reply) for reply in replies if not reply.short),
            self.bytes_down + sum(len(order.cohort) * bytes_of(order.sent) for order in orders),
        )


def _uploaded(phase: Phase, reply: Reply) -> int:
    """A mean has the shape of one upload; what is stacked holds them all."""
    weights = {
        group: 1 if rule is Collect.EVERY else len(reply.clients)
        for group, rule in phase.collect.items()
    }
    # else it was counted just now
    weights |= {name: 1 for name, group in phase.every.items() if group not in phase.collect}
    return sum(
        weight * bytes_of({group: reply.collected[group]}) for group, weight in weights.items()
    )
