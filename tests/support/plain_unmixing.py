"""Mix2FLD once more, in plain PyTorch (see plain.py). What is drawn is taken from the package's
keys, since that is a choice and not a formula.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, one_hot, softmax

from feddkd.data.batches import Reads, draw
from feddkd.randomness import step_keys, uniform
from feddkd.rounds.loop import choose
from plain_drift import Hooked


class Mixed(NamedTuple):
    """A mixed example of client k, with weight lam for the label a and 1 - lam for b."""

    k: int
    x: Tensor
    a: int
    b: int


@dataclass
class Mix2FLD(Hooked):
    classes: int = 3
    lam: float = 0.1
    beta: float = 0.01
    mixed: int = 50
    samples: int = 100
    server_steps: int = 4
    server_size: int = 16
    server_lr: float = 0.01
    dkd_phase: int = 3
    table: list[Mixed] = field(default_factory=list)
    pool: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # x, weights of the labels
    unmixed: bool = False

    def run(self, rounds: int, cohort: int) -> None:
        heard: set[int] = set()
        for t in range(1, rounds + 1):
            active = choose(self.seed, t, len(self.clients), cohort)
            new = [k for k in active if k not in heard]
            for k in new:
                self.table += self.mix(k, t)
            heard |= set(new)
            if new:
                found = self.unmix()
                self.pool = [found[n % len(found)] for n in range(self.samples)]
            outputs: dict[int, dict[int, list[Tensor]]] = {}
            teachers = {}
            for k in active:
                self.heard_outputs: dict[int, list[Tensor]] = {}
                teachers[k] = self.train_locally(k, t)
                outputs[k] = self.heard_outputs
            self.convert(outputs, t)
            if self.dkd is not None:
                for j in range(1, self.dkd["steps"] + 1):
                    self.distil(teachers, t, j)

    def train_locally(self, k: int, t: int) -> nn.Module:
        net, (x, y) = self.client_view(k).train(), self.clients[k]
        optimiser = self.optimiser(net.parameters(), lr=self.rate(t))
        for at in draw(self.reads, len(y), (self.seed, t, 1, 1, k)):
            out = net(x[at])
            for label, row in zip(y[at].tolist(), softmax(out.detach(), 1), strict=True):
                self.heard_outputs.setdefault(label, []).append(row)
            optimiser.zero_grad()
            cross_entropy(out, y[at]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        return net

    def mix(self, k: int, t: int) -> list[Mixed]:
        x, y = self.clients[k]
        (at,) = draw(Reads(2 * self.mixed, steps=1), len(y), (self.seed, t, 0, 1, k))
        pairs = zip(at, at[len(at) // 2 :], strict=False)
        some = [(int(i), int(j)) for i, j in pairs][: len(at) // 2]
        return [
            Mixed(k, self.lam * x[i] + (1 - self.lam) * x[j], int(y[i]), int(y[j]))
            for i, j in some
            if y[i] != y[j]
        ]

    def unmix(self) -> list[tuple[Tensor, Tensor]]:
        """Solve v = lam s + (1 - lam) s', v' = lam s' + (1 - lam) s for s."""
        found = []
        for one in self.table:
            for other in self.table:
                if one.k != other.k and (one.a, one.b) == (other.b, other.a):
                    lam = torch.tensor(self.lam, dtype=torch.float64)
                    both = torch.stack([lam, 1 - lam, 1 - lam, lam]).reshape(2, 2)
                    weights = torch.linalg.inv(both)[0]
                    x = weights[0] * one.x + weights[1] * other.x
                    found.append((x, self.hot(one.a)))
        self.unmixed = bool(found)
        return found or [
            (one.x, self.lam * self.hot(one.a) + (1 - self.lam) * self.hot(one.b))
            for one in self.table
        ]

    def hot(self, label: int) -> Tensor:
        return one_hot(torch.tensor(label), self.classes).double()

    def convert(self, outputs: dict[int, dict[int, list[Tensor]]], t: int) -> None:
        known: dict[int, Tensor] = {}
        for label in range(self.classes):
            means = [torch.stack(own[label]).mean(0) for own in outputs.values() if label in own]
            if means:
                known[label] = torch.stack(means).mean(0)
        self.net.train()
        optimiser = torch.optim.SGD(self.net.parameters(), lr=self.server_lr)
        for number in step_keys((self.seed, t, 2, 1, -1), self.server_steps):
            drawn = uniform(torch.tensor(int(number)), (self.server_size,), 2000).double()
            some = [self.pool[int(u * len(self.pool))] for u in drawn.tolist()]
            out = log_softmax(self.net(torch.stack([x for x, _ in some])), 1)
            loss = torch.zeros((), dtype=torch.float64)
            for (_, weights), row in zip(some, out, strict=True):
                loss = loss - (weights * row).sum() / len(some)
                for label, weight in enumerate(weights.tolist()):
                    if label in known:
                        loss = loss - self.beta * weight * (known[label] * row).sum() / len(some)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
