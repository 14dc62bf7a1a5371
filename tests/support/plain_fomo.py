"""FedFomo once more, in plain PyTorch (see plain.py), from the paper's formulas. Who is drawn and
which examples are kept aside is taken from the package's keys.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from feddkd.data.batches import Reads, draw
from plain_drift import Hooked, Numbers, numbers


class AlwaysFirst:
    """Stands for a random generator that never explores."""

    def random(self) -> float:
        return 1.0

    def integers(self, end: int) -> int:
        return 0


@dataclass
class FedFomo(Hooked):
    models: int = 5
    spare: int = 64
    known: dict[int, nn.Module] = field(default_factory=dict)  # the clients' last models
    before: dict[int, nn.Module] = field(default_factory=dict)  # as the round found them
    worth: dict[tuple[int, int], float] = field(default_factory=dict)
    now: int = 0

    def train_locally(self, k: int, t: int) -> nn.Module:
        if t > self.now:
            self.now, self.before = t, dict(self.known)
        net, (x, y) = self.mixed(k), self.clients[k]
        reads = Reads(self.reads.batch_size, self.reads.epochs, spare=self.spare, lasting=True)
        optimiser = self.optimiser(net.train().parameters(), lr=self.rate(t))
        for at in draw(reads, len(y), (self.seed, t, 1, 1, k)):
            assert not set(at.tolist()) & set(self.aside(k))
            optimiser.zero_grad()
            cross_entropy(net(x[at]), y[at]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        self.known[k] = copy.deepcopy(net)
        return net

    def aside(self, k: int) -> list[int]:
        reads: Any = Reads(1, spare=self.spare, lasting=True, aside=True, random=False)
        (at,) = draw(reads, len(self.clients[k][1]), (self.seed, 1, 0, 1, k))
        found: list[int] = at.tolist()
        return found

    def mixed(self, k: int) -> nn.Module:
        """The own model, moved to the better ones among those that are sent."""
        net = self.client_view(k)
        others = sorted(n for n in self.before if n != k)
        sent = sorted(others, key=lambda n: -self.worth.get((k, n), 0.0))[: self.models]
        here, own, values = self.loss_of(net, k), numbers(net), {}
        for n in sent:
            there = numbers(self.before[n])
            square = sum(float((there[p] - own[p]).square().sum()) for p in own)
            values[n] = (here - self.loss_of(self.before[n], k)) / square**0.5
            self.worth[k, n] = self.worth.get((k, n), 0.0) + values[n]
        good = {n: v for n, v in values.items() if v > 0}
        moved: Numbers = dict(own)
        for n, v in good.items():
            there = numbers(self.before[n])
            moved = {p: w + v / sum(good.values()) * (there[p] - own[p]) for p, w in moved.items()}
        net.load_state_dict({**net.state_dict(), **moved})
        return net

    def loss_of(self, net: nn.Module, k: int) -> float:
        x, y = self.clients[k]
        at = self.aside(k)
        with torch.no_grad():
            return float(cross_entropy(copy.deepcopy(net).eval()(x[at]), y[at]))
