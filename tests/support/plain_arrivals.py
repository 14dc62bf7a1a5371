"""ASO-Fed once more, in plain PyTorch (see plain.py): the paper's algorithm, client by client."""

import copy
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from feddkd.data.batches import draw
from plain_drift import Hooked, Numbers, numbers


class Turned:
    """Stands for the generator of a round: the cohort, turned by the number of the round."""

    def __init__(self, round: int) -> None:
        self.round = round

    def permutation(self, n: int) -> Tensor:
        return torch.tensor(turned(n, self.round))


def turned(n: int, round: int) -> list[int]:
    """Return the places of a cohort in the order of their arrivals."""
    return [(place + round) % n for place in range(n)]


@dataclass
class ASOFed(Hooked):
    lam: float = 1.0
    beta: float = 0.001
    feature_learning: bool = False
    now: int = 0
    v: dict[int, Numbers] = field(default_factory=dict)
    h: dict[int, Numbers] = field(default_factory=dict)
    delays: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # what the server sent to each client last, and when
        everyone = range(len(self.clients))
        self.received = {k: (copy.deepcopy(self.net), 0) for k in everyone}
        self.heard: set[int] = set()
        self.round = -1

    def train_locally(self, k: int, t: int) -> nn.Module:
        sent, _ = self.received[k]
        net, (x, y), zero = copy.deepcopy(sent).train(), self.clients[k], numbers(sent)
        for tensor in zero.values():
            tensor.zero_()
        past = self.delays.get(k, [])
        r = max(1.0, math.log(sum(past) / len(past))) if past else 1.0
        optimiser = self.optimiser(net.parameters(), lr=r * self.rate(t))
        v, h, names = self.v.get(k, zero), self.h.get(k, zero), list(zero)
        for at in draw(self.reads, len(y), (self.seed, t, 0, 1, k)):
            apart = sum(
                ((a - b.detach()) ** 2).sum()
                for a, b in zip(net.parameters(), sent.parameters(), strict=True)
            )
            surrogate = cross_entropy(net(x[at]), y[at]) + self.lam / 2 * apart
            gradient = torch.autograd.grad(surrogate, list(net.parameters()))
            g = dict(zip(names, gradient, strict=True))
            for name, parameter in net.named_parameters():
                parameter.grad = g[name] - v[name] + h[name]
            h = {n: self.beta * h[n] + (1 - self.beta) * v[n] for n in names}
            v = g
            optimiser.step()
        self.v[k], self.h[k] = v, h
        return net

    def average(self, teachers: dict[int, nn.Module]) -> None:
        """The server answers one client after another."""
        self.round += 1
        cohort = list(teachers)
        self.heard |= set(cohort)
        known = [len(self.clients[k][1]) for k in self.heard]
        total = sum(known) / len(known) * len(self.clients)
        for k in [cohort[place] for place in turned(len(cohort), self.round)]:
            self.now += 1
            old, then = self.received[k]
            self.delays.setdefault(k, []).append(self.now - then)
            self.arrive(len(self.clients[k][1]) / total, old, teachers[k])
            self.received[k] = (copy.deepcopy(self.net), self.now)

    @torch.no_grad()
    def arrive(self, share: float, old: nn.Module, new: nn.Module) -> None:
        w_old, w_new = numbers(old), numbers(new)
        for name, w in self.net.named_parameters():
            w.sub_(share * (w_old[name] - w_new[name]))
        for b, b_new in zip(self.net.buffers(), new.buffers(), strict=True):
            b.copy_((1 - share) * b + share * b_new if b.is_floating_point() else max(b, b_new))
        if self.feature_learning:
            for unit in next(self.net.parameters()):  # the weights into one unit
                alpha = unit.abs().exp() / unit.abs().exp().sum()
                unit.copy_(alpha * unit)
