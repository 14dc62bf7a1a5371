"""FedDistill and FedGen once more, in plain PyTorch, from the formulas: see plain.py. The noise of
the generator is drawn by the package's keys, since that is a choice and not a formula.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax, nll_loss, softmax

from feddkd.data.batches import draw
from feddkd.randomness import step_keys, uniform
from feddkd.rounds.loop import choose
from plain import Plain


@dataclass
class Labelled(Plain):
    """Local training whose loss may look at labels, logits and the step's key."""

    classes: int = 3

    def run(self, rounds: int, cohort: int) -> None:
        for t in range(1, rounds + 1):
            active = choose(self.seed, t, len(self.clients), cohort)
            nets = {k: self.train_locally(k, t) for k in active}
            self.after_training(nets, t)
            self.average(nets)
            if self.dkd is not None:
                for j in range(1, self.dkd["steps"] + 1):
                    self.distil(nets, t, j)

    def train_locally(self, k: int, t: int) -> nn.Module:
        net = self.client_view(k).train()
        optimiser = self.optimiser(net.parameters(), lr=self.lr * self.lr_decay ** (t - 1))
        self.before_training(k, t)
        for x, y, key in self.batches(k, t):
            logits = net(x)
            loss = nll_loss(log_softmax(logits, dim=1), y) + self.added(net, logits, y, k, t, key)
            descend(optimiser, net, loss)
            self.note(k, logits.detach(), y)
        return net

    def batches(self, k: int, t: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        (x, y), path = self.clients[k], (self.seed, t, 0, 1, k)
        drawn = draw(self.reads, len(y), path)
        for indices, number in zip(drawn, step_keys(path, len(drawn)), strict=True):
            yield x[indices], y[indices], torch.tensor(int(number))

    def before_training(self, k: int, t: int) -> None: ...

    def after_training(self, nets: dict[int, nn.Module], t: int) -> None: ...

    def added(
        self, net: nn.Module, logits: Tensor, y: Tensor, k: int, t: int, key: Tensor
    ) -> Tensor:
        raise NotImplementedError

    def note(self, k: int, logits: Tensor, y: Tensor) -> None: ...


@dataclass
class PlainFedDistill(Labelled):
    coefficient: float = 1.0
    leave_one_out: bool = False
    first_count: int = 1
    # (client, label) -> sum of logits
    sums: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    counts: dict[tuple[int, int], int] = field(default_factory=dict)
    # client of the last round -> label -> mean logits it sent
    last: dict[int, dict[int, Tensor]] = field(default_factory=dict)

    def note(self, k: int, logits: Tensor, y: Tensor) -> None:
        for row, label in zip(logits, y.tolist(), strict=True):
            self.sums[k, label] = self.sums.get((k, label), torch.zeros_like(row)) + row
            self.counts[k, label] = self.counts.get((k, label), self.first_count) + 1

    def after_training(self, nets: dict[int, nn.Module], t: int) -> None:
        self.last = {}
        outputs = next(iter(self.sums.values())).shape[0]
        for k in nets:
            self.last[k] = {}
            for label in range(self.classes):
                if (k, label) in self.sums:
                    self.last[k][label] = self.sums[k, label] / self.counts[k, label]
                elif self.first_count:  # nought divided by one
                    self.last[k][label] = torch.zeros(outputs, dtype=torch.float64)

    def teachers(self, k: int, label: int) -> list[Tensor]:
        others = [
            rows for client, rows in self.last.items() if not (self.leave_one_out and client == k)
        ]
        return [rows[label] for rows in others if label in rows]

    def added(
        self, net: nn.Module, logits: Tensor, y: Tensor, k: int, t: int, key: Tensor
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for row, label in zip(logits, y.tolist(), strict=True):
            if teachers := self.teachers(k, label):
                target = softmax(torch.stack(teachers).sum(0) / len(teachers), dim=0)
                total = total + kl_div(log_softmax(row, dim=0), target, reduction="sum")
        return self.coefficient * total / len(y)


@dataclass
class PlainFedGen(Labelled):
    generator: nn.Module = field(default_factory=nn.Identity)
    generator_optimiser: Callable[..., torch.optim.Optimizer] = torch.optim.Adam
    alpha: float = 10.0
    beta: float = 1.0
    generated: int = 5
    noise: int = 4
    steps: int = 6
    size: int = 8
    published: bool = False
    diversity: float = 1.0
    known: set[int] = field(default_factory=set)
    # client of this round -> its label counts
    counts: dict[int, list[int]] = field(default_factory=dict)
    adam: torch.optim.Optimizer | None = None

    def before_training(self, k: int, t: int) -> None:
        self.counts[k] = [1] * self.classes

    def note(self, k: int, logits: Tensor, y: Tensor) -> None:
        for label in y.tolist():
            self.counts[k][label] += 1

    def make(self, y: Tensor, key: Tensor, stream: int) -> tuple[Tensor, Tensor]:
        noise = uniform(key, (len(y), self.noise), stream).double()
        return noise, self.generator(
            torch.cat([noise, nn.functional.one_hot(y, self.classes).double()], dim=1)
        )

    def some(self, labels: set[int], key: Tensor, size: int) -> Tensor:
        choice = sorted(labels)
        return torch.tensor(
            [choice[int(u * len(choice))] for u in uniform(key, (size,), 2000).double().tolist()]
        )

    def added(
        self, net: nn.Module, logits: Tensor, y: Tensor, k: int, t: int, key: Tensor
    ) -> Tensor:
        if t == 1:
            return torch.zeros((), dtype=torch.float64)
        self.generator.eval()
        drawn, head = self.some(self.known, key, self.generated), last_layer(net)
        with torch.no_grad():
            (_, invented), (_, like_own) = self.make(drawn, key, 2001), self.make(y, key, 2002)
            target = softmax(head(like_own), dim=1)
        fade = 0.98 ** (t - 1)
        right = nn.functional.cross_entropy(head(invented), drawn)
        agree = kl_div(log_softmax(logits, dim=1), target, reduction="batchmean")
        return (
            self.generated / self.reads.batch_size * self.alpha * fade * right
            + self.beta * fade * agree
        )

    def after_training(self, nets: dict[int, nn.Module], t: int) -> None:
        self.counts = {k: self.counts[k] for k in nets}
        present = {c for own in self.counts.values() for c in range(self.classes) if own[c] > 1}
        self.known |= present
        self.adam = self.adam or self.generator_optimiser(self.generator.parameters())
        for group in self.adam.param_groups:
            group["lr"] = 0.001 * 0.98 ** (t - 1)
        self.generator.train()
        for number in step_keys((self.seed, t, 1, 1, -1), self.steps):
            key = torch.tensor(int(number))
            descend(
                self.adam,
                self.generator,
                self.generator_loss(nets, self.some(present, key, self.size), key),
            )

    def generator_loss(self, nets: dict[int, nn.Module], y: Tensor, key: Tensor) -> Tensor:
        noise, made = self.make(y, key, 2001)
        loss = torch.zeros((), dtype=torch.float64)
        for k, net in nets.items():
            shares = [
                self.counts[k][c] / sum(own[c] for own in self.counts.values()) for c in y.tolist()
            ]
            weight = torch.tensor(shares, dtype=torch.float64)
            errors = nn.functional.cross_entropy(last_layer(net)(made), y, reduction="none")
            # the slip: [B] times [B, 1]
            product = errors * weight.reshape(-1, 1) if self.published else errors * weight
            loss = loss + product.mean()
        pairs = [
            ((noise[i] - noise[j]) ** 2).mean() * (made[i] - made[j]).abs().mean()
            for i in range(len(y))
            for j in range(len(y))
        ]
        return loss + self.diversity * torch.exp(-torch.stack(pairs).mean())


def descend(optimiser: torch.optim.Optimizer, net: nn.Module, loss: Tensor) -> None:
    parameters = list(net.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    optimiser.step()


def last_layer(net: nn.Module) -> nn.Linear:
    return [module for module in net.modules() if isinstance(module, nn.Linear)][-1]
