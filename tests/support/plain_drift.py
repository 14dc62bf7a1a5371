"""Methods against client drift once more, in plain PyTorch (see plain.py):

modules, autograd, loops, the papers' formulas.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax

from feddkd.data.batches import draw
from plain import Plain

Numbers = dict[str, Tensor]


def numbers(net: nn.Module) -> Numbers:
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


def features(net: nn.Module, x: Tensor) -> Tensor:
    """Return the input of the last layer of a sequential net, in evaluation mode."""
    assert isinstance(net, nn.Sequential)
    with torch.no_grad():
        return copy.deepcopy(net).eval()[:-1](x)  # type: ignore[no-any-return]


def shifted_by(net: nn.Module, along: Numbers, by: float) -> nn.Module:
    """A copy of a net with its weights moved by a multiple of some direction."""
    other = copy.deepcopy(net)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.add_(by * along[name])
    return other


def logits(net: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return copy.deepcopy(net).eval()(x)  # type: ignore[no-any-return]


@dataclass
class Hooked(Plain):
    """Local training with places to hook in."""

    rho: float = 0.0
    nesterov: bool = False

    def term(
        self, k: int, net: nn.Module, sent: nn.Module, x: Tensor, y: Tensor, z: Tensor, out: Tensor
    ) -> Tensor:
        return torch.zeros((), dtype=torch.float64)

    def direction(self, k: int, name: str, gradient: Tensor) -> Tensor:
        return gradient

    def end(self, k: int, t: int, net: nn.Module, sent: nn.Module, steps: int) -> None:
        pass

    def train_locally(self, k: int, t: int) -> nn.Module:
        sent, net, (x, y) = self.client_view(k), self.client_view(k).train(), self.clients[k]
        optimiser = self.optimiser(net.parameters(), lr=self.rate(t))
        batches = draw(self.reads, len(y), (self.seed, t, 0, 1, k))
        for j, at in enumerate(batches, 1):
            gradients = self.gradients(k, net, sent, x[at], y[at])
            for name, parameter in net.named_parameters():
                parameter.grad = self.direction(k, name, gradients[name])
            self.step(optimiser, net, t, j)
        self.end(k, t, net, sent, len(batches))
        return net

    def gradients(self, k: int, net: nn.Module, sent: nn.Module, x: Tensor, y: Tensor) -> Numbers:
        """The gradient of the loss at the net's weights."""
        assert isinstance(net, nn.Sequential)
        z = net[:-1](x)
        out = net[-1](z)
        loss = self.loss(k, out, y) + self.term(k, net, sent, x, y, z, out)
        names, parameters = zip(*net.named_parameters(), strict=True)
        return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))

    def loss(self, k: int, out: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(out, y)

    def length(self, steps: int) -> float:
        """The sum over gradients of the weight that each has in the whole move, by definition, in
        units of the round's rate.
        """
        rho = self.rho
        velocity = [sum(rho ** (j - i) for i in range(j + 1)) for j in range(steps)]
        weights = [1 + rho * v for v in velocity] if self.nesterov else velocity
        return sum(self.by_step(j) * weight for j, weight in enumerate(weights, 1))

    def shared(self) -> list[str]:
        return [name for name, _ in self.net.named_parameters() if not self.private(name)]

    def put(self, values: Numbers) -> None:
        self.net.load_state_dict({**self.net.state_dict(), **values})


@dataclass
class Scaffold(Hooked):
    c: Numbers = field(default_factory=dict)
    c_k: dict[int, Numbers] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.c = {
            name: torch.zeros_like(tensor)
            for name, tensor in numbers(self.net).items()
            if name in self.shared()
        }
        self.c_k = {k: dict(self.c) for k in range(len(self.clients))}
        self.change: dict[int, Numbers] = {}

    def direction(self, k: int, name: str, gradient: Tensor) -> Tensor:
        return gradient - self.c_k[k][name] + self.c[name] if name in self.c else gradient

    def end(self, k: int, t: int, net: nn.Module, sent: nn.Module, steps: int) -> None:
        before, after, scale = (
            numbers(sent),
            numbers(net),
            self.length(steps) * self.rate(t),
        )
        fresh = {
            name: self.c_k[k][name] - self.c[name] + (before[name] - after[name]) / scale
            for name in self.c
        }
        self.change[k] = {name: fresh[name] - self.c_k[k][name] for name in self.c}
        self.c_k[k] = fresh

    def average(self, teachers: dict[int, nn.Module]) -> None:
        super().average(teachers)
        for name in self.c:
            mean = sum(self.change[k][name] for k in teachers) / len(teachers)
            self.c[name] = self.c[name] + len(teachers) / len(self.clients) * mean


@dataclass
class FedDyn(Hooked):
    alpha: float = 0.01

    def __post_init__(self) -> None:
        self.h = {
            name: torch.zeros_like(tensor)
            for name, tensor in numbers(self.net).items()
            if name in self.shared()
        }
        self.h_k = {k: dict(self.h) for k in range(len(self.clients))}

    def term(
        self, k: int, net: nn.Module, sent: nn.Module, x: Tensor, y: Tensor, z: Tensor, out: Tensor
    ) -> Tensor:
        total, start = torch.zeros((), dtype=torch.float64), numbers(sent)
        for name, parameter in net.named_parameters():
            if name in self.h:
                total = total - torch.dot(self.h_k[k][name].flatten(), parameter.flatten())
                total = total + self.alpha / 2 * (parameter - start[name]).norm() ** 2
        return total

    def end(self, k: int, t: int, net: nn.Module, sent: nn.Module, steps: int) -> None:
        before, after = numbers(sent), numbers(net)
        self.h_k[k] = {
            name: h - self.alpha * (after[name] - before[name]) for name, h in self.h_k[k].items()
        }

    def average(self, teachers: dict[int, nn.Module]) -> None:
        before, trained = numbers(self.net), [numbers(net) for net in teachers.values()]
        super().average(teachers)
        for name in self.h:
            self.h[name] = self.h[name] - self.alpha / len(self.clients) * sum(
                w[name] - before[name] for w in trained
            )
            self.put(
                {name: sum(w[name] for w in trained) / len(trained) - self.h[name] / self.alpha}
            )


@dataclass
class FedNova(Hooked):
    def __post_init__(self) -> None:
        self.a: dict[int, float] = {}

    def end(self, k: int, t: int, net: nn.Module, sent: nn.Module, steps: int) -> None:
        self.a[k] = self.length(steps)

    def average(self, teachers: dict[int, nn.Module]) -> None:
        before, trained = numbers(self.net), {k: numbers(net) for k, net in teachers.items()}
        super().average(teachers)
        total = sum(len(self.clients[k][1]) for k in teachers)
        p = {k: len(self.clients[k][1]) / total for k in teachers}
        tau = sum(p[k] * self.a[k] for k in teachers)
        for name in self.shared():
            move = sum(p[k] * (before[name] - trained[k][name]) / self.a[k] for k in teachers)
            self.put({name: before[name] - tau * move})


@dataclass
class Moon(Hooked):
    mu: float = 1.0
    temperature: float = 0.5

    def __post_init__(self) -> None:
        self.previous = {k: copy.deepcopy(self.net) for k in range(len(self.clients))}

    def term(
        self, k: int, net: nn.Module, sent: nn.Module, x: Tensor, y: Tensor, z: Tensor, out: Tensor
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for own, glob, prev in zip(
            z, features(sent, x), features(self.previous[k], x), strict=True
        ):
            near, far = (
                torch.exp(own @ other / own.norm() / other.norm() / self.temperature)
                for other in (glob, prev)
            )
            total = total - torch.log(near / (near + far))
        return self.mu * total / len(y)

    def end(self, k: int, t: int, net: nn.Module, sent: nn.Module, steps: int) -> None:
        self.previous[k] = copy.deepcopy(net)


def soft_targets(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    taught = softmax(teacher / temperature, dim=1)
    return temperature**2 * kl_div(
        log_softmax(student / temperature, dim=1), taught, reduction="batchmean"
    )


@dataclass
class FedNTD(Hooked):
    beta: float = 1.0
    temperature: float = 1.0

    def term(
        self, k: int, net: nn.Module, sent: nn.Module, x: Tensor, y: Tensor, z: Tensor, out: Tensor
    ) -> Tensor:
        def others(scores: Tensor) -> Tensor:
            return torch.stack(
                [
                    torch.cat([row[:label], row[label + 1 :]])
                    for row, label in zip(scores, y, strict=True)
                ]
            )

        return self.beta * soft_targets(others(logits(sent, x)), others(out), self.temperature)


@dataclass
class FedGKD(Hooked):
    c: float = 0.1
    buffer: int = 5
    temperature: float = 1.0

    def __post_init__(self) -> None:
        self.begun: list[Numbers] = []  # the models that rounds began with

    def train_locally(self, k: int, t: int) -> nn.Module:
        if len(self.begun) < t:
            self.begun.append(
                {name: tensor.clone() for name, tensor in self.net.state_dict().items()}
            )
        return super().train_locally(k, t)

    def term(
        self, k: int, net: nn.Module, sent: nn.Module, x: Tensor, y: Tensor, z: Tensor, out: Tensor
    ) -> Tensor:
        if len(self.begun) == 1:
            return torch.zeros((), dtype=torch.float64)
        teacher, last = copy.deepcopy(sent), self.begun[-self.buffer :]
        floats = [
            name
            for name, tensor in last[0].items()
            if tensor.is_floating_point() and not self.private(name)
        ]
        mean = {name: sum(state[name] for state in last) / len(last) for name in floats}
        teacher.load_state_dict({**teacher.state_dict(), **mean})
        return self.c * soft_targets(logits(teacher, x), out, self.temperature)


Make = Callable[..., Hooked]
