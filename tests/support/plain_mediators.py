"""Astraea's mediators once more, in plain PyTorch:

modules, torch.optim, loops. Nothing here calls the package's mathematics.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from feddkd.data.batches import Reads, draw
from feddkd.rounds.loop import choose
from plain_matching import Pair, distil


@dataclass
class PlainAstraea:
    net: nn.Sequential
    clients: list[Pair]
    seed: int
    classes: int
    gamma: int
    passes: int
    settings: dict[str, Any]  # of torch.optim.SGD
    reads: Reads
    dkd_steps: int = 0

    def run(self, rounds: int, cohort: int) -> None:
        for t in range(1, rounds + 1):
            groups = self.mediators(list(choose(self.seed, t, len(self.clients), cohort)))
            teachers: dict[int, nn.Sequential] = {}
            results = []
            for group in groups:
                net = copy.deepcopy(self.net)
                for turn in range(self.passes):
                    for seat, k in enumerate(group):
                        self.train(net, k, (self.seed, t, 1, turn * self.gamma + seat + 1, k))
                        teachers[k] = copy.deepcopy(net)
                results.append((net, sum(len(self.clients[k][1]) for k in group)))
            self.average(results)
            for j in range(1, self.dkd_steps + 1):
                distil(
                    self.net,
                    dict(sorted(teachers.items())),
                    self.clients,
                    (self.seed, t, 2, j),
                    lr=0.3,
                    size=5,
                )

    def mediators(self, free: list[int]) -> list[list[int]]:
        groups = []
        while free:
            group: list[int] = []
            while free and len(group) < self.gamma:
                best = min(free, key=lambda k: self.divergence([*group, k]))
                group.append(best)
                free.remove(best)
            groups.append(group)
        return groups

    def divergence(self, group: list[int]) -> float:
        """KL(labels of the group || uniform)"""
        labels = [int(y) for k in group for y in self.clients[k][1]]
        shares = [labels.count(c) / len(labels) for c in range(self.classes)]
        return sum(p * math.log(p * self.classes) for p in shares if p > 0)

    def train(self, net: nn.Sequential, k: int, path: tuple[int, ...]) -> None:
        x, y = self.clients[k]
        net.train()
        optimiser = torch.optim.SGD(net.parameters(), **self.settings)
        parameters = list(net.parameters())
        for indices in draw(self.reads, len(y), path):
            loss = cross_entropy(net(x[indices]), y[indices])
            for parameter, gradient in zip(
                parameters, torch.autograd.grad(loss, parameters), strict=True
            ):
                parameter.grad = gradient
            optimiser.step()

    def average(self, results: list[tuple[nn.Sequential, int]]) -> None:
        total = sum(n for _, n in results)
        state = self.net.state_dict()
        for name, tensor in state.items():
            own = [(net.state_dict()[name], n) for net, n in results]
            if tensor.is_floating_point():
                state[name] = torch.stack([n / total * one for one, n in own]).sum(0)
            else:
                state[name] = torch.stack([one for one, _ in own]).max()
        self.net.load_state_dict(state)
