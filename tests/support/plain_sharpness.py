"""Sharpness-aware methods, momentum in clients and longer steps of the server once more, in plain
PyTorch (see plain.py).
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plain_drift import FedDyn, Hooked, Numbers, Scaffold, numbers


def flat(values: Numbers) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in values.values()])


def shifted(net: nn.Module, by: Numbers) -> nn.Module:
    """A copy of a net with its weights moved."""
    other = copy.deepcopy(net)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.add_(by[name])
    return other


def of_length(values: Numbers, rho: float) -> Numbers:
    size = flat(values).norm()
    return {name: rho * tensor / size if size else tensor for name, tensor in values.items()}


@dataclass
class FedSAM(Hooked):
    perturbation: float = 0.05

    def gradients(self, k: int, net: nn.Module, sent: nn.Module, x: Tensor, y: Tensor) -> Numbers:
        ascent = of_length(super().gradients(k, net, sent, x, y), self.perturbation)
        return super().gradients(k, shifted(net, ascent), sent, x, y)


@dataclass
class FedCM(Hooked):
    """With clients of weights n_k, and K as their mean."""

    alpha: float = 0.1

    def __post_init__(self) -> None:
        self.momentum = {name: torch.zeros_like(numbers(self.net)[name]) for name in self.shared()}
        self.steps: dict[int, float] = {}
        self.now = 1

    def direction(self, k: int, name: str, gradient: Tensor) -> Tensor:
        if name not in self.momentum:
            return gradient
        return self.alpha * gradient + (1 - self.alpha) * self.momentum[name]

    def end(self, k: int, t: int, net: nn.Module, sent: nn.Module, steps: int) -> None:
        self.steps[k], self.now = self.length(steps), t

    def average(self, teachers: dict[int, nn.Module]) -> None:
        before = numbers(self.net)
        super().average(teachers)
        total = sum(len(self.clients[k][1]) for k in teachers)
        mean_steps = sum(len(self.clients[k][1]) / total * self.steps[k] for k in teachers)
        after = numbers(self.net)
        self.momentum = {
            name: -(after[name] - before[name]) / mean_steps / self.rate(self.now)
            for name in self.momentum
        }


@dataclass
class MoFedSAM(FedCM, FedSAM):
    pass


@dataclass
class FedExP(Hooked):
    epsilon: float = 1e-3

    def average(self, teachers: dict[int, nn.Module]) -> None:
        before = numbers(self.net)
        super().average(teachers)
        total = sum(len(self.clients[k][1]) for k in teachers)
        moves = {
            k: {name: numbers(net)[name] - before[name] for name in self.shared()}
            for k, net in teachers.items()
        }
        p = {k: len(self.clients[k][1]) / total for k in teachers}
        mean: Numbers = {
            name: torch.stack([p[k] * moves[k][name] for k in teachers]).sum(0)
            for name in self.shared()
        }
        spread = sum(p[k] * flat(moves[k]).dot(flat(moves[k])) for k in teachers)
        eta = max(1.0, float(spread / (2 * (flat(mean).dot(flat(mean)) + self.epsilon))))
        self.put({name: before[name] + eta * mean[name] for name in mean})


@dataclass
class FedACG(Hooked):
    momentum: float = 0.85
    beta: float = 0.001

    def __post_init__(self) -> None:
        self.m = {name: torch.zeros_like(numbers(self.net)[name]) for name in self.shared()}

    def ahead(self) -> Numbers:
        w = numbers(self.net)
        return {name: w[name] + self.momentum * m for name, m in self.m.items()}

    def client_view(self, k: int) -> nn.Module:
        net = super().client_view(k)
        if self.training:
            net.load_state_dict({**net.state_dict(), **self.ahead()})
        return net

    training = False

    def train_locally(self, k: int, t: int) -> nn.Module:
        self.training = True  # only then are clients sent the look-ahead
        net = super().train_locally(k, t)
        self.training = False
        return net

    def term(
        self, k: int, net: nn.Module, sent: nn.Module, x: Tensor, y: Tensor, z: Tensor, out: Tensor
    ) -> Tensor:
        start = numbers(sent)
        apart = [(w - start[n]).flatten() for n, w in net.named_parameters() if n in self.m]
        return self.beta / 2 * torch.cat(apart).square().sum()

    def average(self, teachers: dict[int, nn.Module]) -> None:
        before, ahead = numbers(self.net), self.ahead()
        super().average(teachers)
        after = numbers(self.net)
        delta = {name: after[name] - ahead[name] for name in self.m}
        self.m = {name: self.momentum * m + delta[name] for name, m in self.m.items()}
        self.put({name: before[name] + m for name, m in self.m.items()})


@dataclass
class FedGamma(Scaffold, FedSAM):
    perturbation: float = 0.1


@dataclass
class FedSpeed(FedDyn):
    """FedDyn's duals; the gradient at the perturbed weights, the correction at the weights."""

    alpha: float = 0.1
    perturbation: float = 0.1

    def perturb(self, k: int, gradient: Numbers) -> Numbers:
        return of_length(gradient, self.perturbation)

    def gradients(self, k: int, net: nn.Module, sent: nn.Module, x: Tensor, y: Tensor) -> Numbers:
        first = Hooked.gradients(self, k, net, sent, x, y)
        found = Hooked.gradients(self, k, shifted(net, self.perturb(k, first)), sent, x, y)
        start, now = numbers(sent), numbers(net)
        for name, h_k in self.h_k[k].items():
            found[name] = found[name] - h_k + self.alpha * (now[name] - start[name])
        return found

    def term(
        self, k: int, net: nn.Module, sent: nn.Module, x: Tensor, y: Tensor, z: Tensor, out: Tensor
    ) -> Tensor:
        return torch.zeros((), dtype=torch.float64)


@dataclass
class FedSMOO(FedSpeed):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.s = {name: torch.zeros_like(h) for name, h in self.h.items()}
        self.mu = {k: dict(self.s) for k in range(len(self.clients))}

    def perturb(self, k: int, gradient: Numbers) -> Numbers:
        towards = {
            name: g - self.mu[k][name] - self.s[name] if name in self.s else g
            for name, g in gradient.items()
        }
        e = of_length(towards, self.perturbation)
        self.mu[k] = {name: mu + e[name] - self.s[name] for name, mu in self.mu[k].items()}
        return e

    def average(self, teachers: dict[int, nn.Module]) -> None:
        super().average(teachers)
        mean: Numbers = {
            name: torch.stack([self.mu[k][name] for k in teachers]).mean(0) for name in self.s
        }
        self.s = of_length(mean, self.perturbation)


@dataclass
class FedLESAM(Hooked):
    perturbation: float = 0.1

    def __post_init__(self) -> None:
        first = {name: numbers(self.net)[name] for name in self.shared()}
        self.old = dict.fromkeys(range(len(self.clients)), first)

    def gradients(self, k: int, net: nn.Module, sent: nn.Module, x: Tensor, y: Tensor) -> Numbers:
        now = numbers(sent)
        back = of_length({n: old - now[n] for n, old in self.old[k].items()}, self.perturbation)
        still = {name: torch.zeros_like(w) for name, w in now.items()}
        there = shifted(net, {**still, **back})
        found = super().gradients(k, there, sent, x, y)
        net.load_state_dict({**net.state_dict(), **dict(there.named_buffers())})
        return found

    def end(self, k: int, t: int, net: nn.Module, sent: nn.Module, steps: int) -> None:
        self.old[k] = {name: numbers(sent)[name] for name in self.old[k]}
