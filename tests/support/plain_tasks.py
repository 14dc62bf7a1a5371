"""Federated training on any task once more, in plain PyTorch: modules, autograd, loops (see
plain.py).

Only who is active and who reads which examples when is taken from the package.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from feddkd.data.batches import Reads, draw
from feddkd.rounds.loop import choose
from feddkd.trees import take
from small_tasks import SmallTask

LOCAL = "epochs=1, batch_size=8, lr=0.1"
METHODS = {
    "fedavg": f"fedavg({LOCAL})",
    "fedprox": f"fedprox({LOCAL}, mu=0.5)",
    "scaffold": f"scaffold({LOCAL})",
    "feddkd": f"fedavg({LOCAL}) | dkd(steps=2, batch_size=7, lr=0.2)",
    "weighted": f"fedavg({LOCAL}) | dkd(steps=2, batch_size=7, lr=0.2, weights='examples')",
}
Numbers = dict[str, Tensor]


@dataclass
class PlainTaskRun:
    """A run of one of METHODS; `net` is the global model."""

    task: SmallTask
    net: nn.Module
    clients: list[tuple[Any, Any]]
    method: str
    seed: int
    control: Numbers = field(default_factory=dict)
    controls: dict[int, Numbers] = field(default_factory=dict)

    def play(self, rounds: int, cohort: int) -> None:
        nothing = {name: torch.zeros_like(w) for name, w in self.net.named_parameters()}
        self.control = dict(nothing)
        self.controls = {k: dict(nothing) for k in range(len(self.clients))}
        for t in range(1, rounds + 1):
            active = choose(self.seed, t, len(self.clients), cohort)
            trained = {k: self.train(k, t) for k in active}
            self.renew_controls(trained)
            self.average(trained)
            for step in (1, 2) if "dkd" in METHODS[self.method] else ():
                self.distil(trained, t, step)

    def batches(self, k: int, t: int, phase: int, step: int, reads: Reads) -> list[Any]:
        count = len(self.clients[k][0])
        return draw(reads, count, (self.seed, t, phase, step, k))

    def train(self, k: int, t: int) -> nn.Module:
        net, (x, y) = copy.deepcopy(self.net), self.clients[k]
        for at in self.batches(k, t, 0, 1, Reads(8)):
            loss = self.task.loss(net(x[at]), take(y, at))
            if self.method == "fedprox":
                pairs = zip(net.parameters(), self.net.parameters(), strict=True)
                loss = loss + 0.25 * sum(((w - v.detach()) ** 2).sum() for w, v in pairs)
            gradients = torch.autograd.grad(loss, list(net.parameters()))
            with torch.no_grad():
                for (name, w), g in zip(net.named_parameters(), gradients, strict=True):
                    if self.method == "scaffold":
                        g = g - self.controls[k][name] + self.control[name]
                    w.sub_(0.1 * g)
        return net

    def renew_controls(self, trained: dict[int, nn.Module]) -> None:
        """Option II of SCAFFOLD."""
        if self.method != "scaffold":
            return
        before, change = dict(self.net.named_parameters()), dict[str, Tensor]()
        for k, net in trained.items():
            steps = -(-len(self.clients[k][0]) // 8)
            for name, w in net.named_parameters():
                moved = ((before[name] - w) / (steps * 0.1)).detach()
                new = self.controls[k][name] - self.control[name] + moved
                change[name] = change.get(name, 0) + new - self.controls[k][name]
                self.controls[k][name] = new
        for name, total in change.items():
            self.control[name] = self.control[name] + total / len(self.clients)

    def average(self, trained: dict[int, nn.Module]) -> None:
        weights = {k: self.task.weight(self.clients[k][1]) for k in trained}
        parts = {k: dict(net.named_parameters()) for k, net in trained.items()}
        with torch.no_grad():
            for name, w in self.net.named_parameters():
                total = torch.stack([weights[k] * parts[k][name] for k in trained]).sum(0)
                w.copy_(total / sum(weights.values()))

    def distil(self, teachers: dict[int, nn.Module], t: int, step: int) -> None:
        """One step on the mean over clients of the divergence on their batches."""
        pooled, total = torch.zeros((), dtype=torch.float64), 0
        for k, teacher in teachers.items():
            x, y = self.clients[k]
            (at,) = self.batches(k, t, 1, step, Reads(7, steps=1))
            with torch.no_grad():
                taught = teacher(x[at])
            weight = self.task.weight(y) if self.method == "weighted" else 1
            pooled = pooled + weight * self.task.divergence(taught, self.net(x[at]), take(y, at))
            total += weight
        gradients = torch.autograd.grad(pooled / total, list(self.net.parameters()))
        with torch.no_grad():
            for w, g in zip(self.net.parameters(), gradients, strict=True):
                w.sub_(0.2 * g)
