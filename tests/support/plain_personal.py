"""Personalised methods once more, in plain PyTorch (see plain.py): modules, autograd, loops, the
papers' formulas.
"""

import copy
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from feddkd.data.batches import Reads, draw
from plain_drift import Hooked, Numbers, features, numbers, shifted_by


def head_names(net: nn.Module) -> list[str]:
    """The parameters of the last layer of a sequential net."""
    assert isinstance(net, nn.Sequential)
    return [f"{len(net) - 1}.weight", f"{len(net) - 1}.bias"]


def slopes(net: nn.Module, x: Tensor, y: Tensor) -> Numbers:
    """The gradient of the cross-entropy at a net's weights."""
    names, parameters = zip(*net.named_parameters(), strict=True)
    loss = cross_entropy(net(x), y)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@dataclass
class Personal(Hooked):
    """A run whose clients are judged by their own models."""

    now: int = 1  # the round
    equal: bool = False  # clients have equal weights in the mean

    def judged(self, k: int) -> nn.Module:
        return self.client_view(k)

    def batches(self, k: int, t: int) -> list[tuple[Tensor, Tensor]]:
        x, y = self.clients[k]
        return [(x[at], y[at]) for at in draw(self.reads, len(y), (self.seed, t, 0, 1, k))]

    def train_locally(self, k: int, t: int) -> nn.Module:
        self.now = t
        return super().train_locally(k, t)

    def average(self, teachers: dict[int, nn.Module]) -> None:
        super().average(teachers)
        nets = [net.state_dict() for net in teachers.values()]
        for name, tensor in self.net.state_dict().items():
            if self.equal and tensor.is_floating_point() and not self.private(name):
                tensor.copy_(torch.stack([net[name] for net in nets]).mean(0))

    def train_only(self, net: nn.Module, names: list[str], on: bool) -> None:
        """Freeze the named parameters of a net, or all others."""
        for name, parameter in net.named_parameters():
            parameter.requires_grad_((name in names) == on)

    def step_on(
        self, optimiser: torch.optim.Optimizer, net: nn.Module, x: Tensor, y: Tensor
    ) -> None:
        optimiser.zero_grad()
        cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    def tuned(self, k: int, reads: Reads, lr: float, part: str = "all") -> nn.Module:
        """Client k's view of the global model, trained before the evaluation of a round."""
        net, (x, y) = self.client_view(k).train(), self.clients[k]
        if part != "all":
            self.train_only(net, head_names(net), part == "head")
        optimiser = self.optimiser(net.parameters(), lr=lr)
        key = ("evaluate", self.seed, self.now, 0, 2, k)
        for at in draw(reads, len(y), key):
            self.step_on(optimiser, net, x[at], y[at])
        return net


@dataclass
class FedRep(Personal):
    head_epochs: int = 2
    body_epochs: int = 2

    def train_locally(self, k: int, t: int) -> nn.Module:
        net = self.client_view(k).train()
        optimiser = self.optimiser(net.parameters(), lr=self.rate(t))
        batches = self.batches(k, t)
        head_steps = len(batches) * self.head_epochs // (self.head_epochs + self.body_epochs)
        for j, (x, y) in enumerate(batches):
            self.train_only(net, head_names(net), j < head_steps)
            self.step_on(optimiser, net, x, y)
        return net.requires_grad_(True)


@dataclass
class FedBABU(Personal):
    tune: Reads = field(default_factory=lambda: Reads(4, epochs=5))
    part: str = "all"

    def train_locally(self, k: int, t: int) -> nn.Module:
        self.now = t
        net = self.client_view(k).train()
        self.train_only(net, head_names(net), on=False)
        optimiser = self.optimiser(net.parameters(), lr=self.rate(t))
        for x, y in self.batches(k, t):
            self.step_on(optimiser, net, x, y)
        return net.requires_grad_(True)

    def judged(self, k: int) -> nn.Module:
        return self.tuned(k, self.tune, self.rate(self.now), self.part)


@dataclass
class FineTuned(Personal):
    tune: Reads = field(default_factory=lambda: Reads(8, epochs=2))
    tune_lr: float = 0.1
    part: str = "all"

    def judged(self, k: int) -> nn.Module:
        return self.tuned(k, self.tune, self.tune_lr, self.part)


@dataclass
class Ditto(Personal):
    lam: float = 1.0

    def __post_init__(self) -> None:
        self.v = {k: copy.deepcopy(self.net) for k in range(len(self.clients))}

    def judged(self, k: int) -> nn.Module:
        return self.v[k]

    def train_locally(self, k: int, t: int) -> nn.Module:
        w_t = numbers(self.net)
        v = self.v[k].train()
        optimiser = self.optimiser(v.parameters(), lr=self.rate(t))
        for x, y in self.batches(k, t):
            g = slopes(v, x, y)
            for name, parameter in v.named_parameters():
                parameter.grad = g[name] + self.lam * (parameter.detach() - w_t[name])
            optimiser.step()
        return super().train_locally(k, t)


@dataclass
class APFL(Personal):
    alpha: float = 0.5
    adaptive: bool = True
    equal: bool = True

    def __post_init__(self) -> None:
        clients = range(len(self.clients))
        self.v = {k: copy.deepcopy(self.net) for k in clients}
        self.u = {k: copy.deepcopy(self.net) for k in clients}
        self.mix = dict.fromkeys(clients, self.alpha)

    def judged(self, k: int) -> nn.Module:
        return self.u[k]

    def mixture(self, k: int, w: nn.Module) -> nn.Module:
        """The mixture of weights; its running statistics are those of v."""
        u, mine, shared = copy.deepcopy(self.v[k]), numbers(self.v[k]), numbers(w)
        with torch.no_grad():
            for name, parameter in u.named_parameters():
                parameter.copy_(self.mix[k] * mine[name] + (1 - self.mix[k]) * shared[name])
        return u

    def train_locally(self, k: int, t: int) -> nn.Module:
        w, lr = self.client_view(k).train(), self.rate(t)
        of_w = self.optimiser(w.parameters(), lr=lr)
        of_v = self.optimiser(self.v[k].parameters(), lr=lr)
        for j, (x, y) in enumerate(self.batches(k, t)):
            u = self.mixture(k, w).train()
            g, mine, shared = slopes(u, x, y), numbers(self.v[k]), numbers(w)
            if self.adaptive and j == 0:
                along = sum(float((g[n] * (mine[n] - shared[n])).sum()) for n in g)
                self.mix[k] = min(max(self.mix[k] - lr * along, 0.0), 1.0)
            for name, parameter in self.v[k].named_parameters():
                parameter.grad = self.mix[k] * g[name]
            of_v.step()
            statistics = {n: b for n, b in u.state_dict().items() if n not in g}
            self.v[k].load_state_dict({**self.v[k].state_dict(), **statistics})
            self.step_on(of_w, w, x, y)
        self.u[k] = self.mixture(k, w)
        return w


@dataclass
class PFedMe(Personal):
    lam: float = 15.0
    inner_steps: int = 5
    inner_lr: float = 0.09
    beta: float = 1.0
    equal: bool = True

    def __post_init__(self) -> None:
        self.theta = {k: copy.deepcopy(self.net) for k in range(len(self.clients))}

    def judged(self, k: int) -> nn.Module:
        return self.theta[k]

    def train_locally(self, k: int, t: int) -> nn.Module:
        w, theta = self.client_view(k), self.client_view(k).train()
        optimiser = self.optimiser(w.parameters(), lr=self.rate(t))
        for x, y in self.batches(k, t):
            statistics = copy.deepcopy(dict(theta.named_buffers()))
            for _ in range(self.inner_steps):
                theta.load_state_dict({**theta.state_dict(), **statistics})  # one pass counts
                g, centre = slopes(theta, x, y), numbers(w)
                with torch.no_grad():
                    for name, parameter in theta.named_parameters():
                        pull = self.lam * (parameter - centre[name])
                        parameter.sub_(self.inner_lr * (g[name] + pull))
            personal = numbers(theta)
            for name, parameter in w.named_parameters():
                parameter.grad = self.lam * (parameter.detach() - personal[name])
            optimiser.step()
        self.theta[k] = theta
        w.load_state_dict({**w.state_dict(), **dict(theta.named_buffers())})
        return w

    def average(self, teachers: dict[int, nn.Module]) -> None:
        before = numbers(self.net)
        super().average(teachers)
        after = numbers(self.net)
        self.put({n: (1 - self.beta) * before[n] + self.beta * after[n] for n in before})


@dataclass
class PerFedAvg(Personal):
    alpha: float = 0.01
    form: str = "fo"
    delta: float = 1e-3
    equal: bool = True
    tune: Reads = field(default_factory=lambda: Reads(4, steps=1))

    def judged(self, k: int) -> nn.Module:
        net, (x, y) = self.client_view(k).train(), self.clients[k]
        for at in draw(self.tune, len(y), ("evaluate", self.seed, self.now, 0, 2, k)):
            net = shifted_by(net, slopes(net, x[at], y[at]), -self.alpha)
        return net

    def train_locally(self, k: int, t: int) -> nn.Module:
        self.now = t
        w, batches = self.client_view(k).train(), self.batches(k, t)
        optimiser = self.optimiser(w.parameters(), lr=self.rate(t))
        several = 2 if self.form == "fo" else 3
        for start in range(0, len(batches), several):
            some = batches[start : start + several]
            u = shifted_by(w, self.slope(w, w, some[0]), -self.alpha)
            if len(some) > 1:
                direction = self.slope(u, w, some[1])
            if len(some) > 2:
                up = self.slope(shifted_by(w, direction, self.delta), w, some[2])
                down = slopes(shifted_by(w, direction, -self.delta), *some[2])
                direction = {
                    n: g - self.alpha * (up[n] - down[n]) / (2 * self.delta)
                    for n, g in direction.items()
                }
            if len(some) == several:
                for name, parameter in w.named_parameters():
                    parameter.grad = direction[name]
                optimiser.step()
        return w

    def slope(self, net: nn.Module, w: nn.Module, batch: tuple[Tensor, Tensor]) -> Numbers:
        """The gradient at a net; the running statistics of w follow this pass."""
        net = copy.deepcopy(net)
        net.load_state_dict({**net.state_dict(), **dict(w.named_buffers())})
        gradient = slopes(net, *batch)
        w.load_state_dict({**w.state_dict(), **dict(net.named_buffers())})
        return gradient


@dataclass
class Balanced(Personal):
    """Methods whose loss knows how many examples of each class a client has."""

    def counts(self, k: int) -> Tensor:
        return torch.bincount(self.clients[k][1], minlength=3).double()


@dataclass
class FedRoD(Balanced):
    def __post_init__(self) -> None:
        assert isinstance(self.net, nn.Sequential)
        zero = {n: torch.zeros_like(v) for n, v in numbers(self.net[-1]).items()}
        self.h = {k: copy.deepcopy(self.net[-1]) for k in range(len(self.clients))}
        for layer in self.h.values():
            layer.load_state_dict(zero)
        self.w: dict[int, nn.Module] = {
            k: copy.deepcopy(self.net) for k in range(len(self.clients))
        }

    def loss(self, k: int, out: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(out + self.counts(k).log(), y)

    def train_locally(self, k: int, t: int) -> nn.Module:
        self.of_h = self.optimiser(self.h[k].parameters(), lr=self.rate(t))
        self.w[k] = super().train_locally(k, t)
        return self.w[k]

    def gradients(self, k: int, net: nn.Module, sent: nn.Module, x: Tensor, y: Tensor) -> Numbers:
        assert isinstance(net, nn.Sequential)
        z = copy.deepcopy(net)[:-1](x).detach()
        self.of_h.zero_grad()
        loss = cross_entropy(net[-1](z).detach() + self.h[k](z), y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.of_h.step()
        return super().gradients(k, net, sent, x, y)

    def judged(self, k: int) -> nn.Module:
        net = copy.deepcopy(self.w[k])
        assert isinstance(net, nn.Sequential)
        both = zip(net[-1].parameters(), self.h[k].parameters(), strict=True)
        with torch.no_grad():
            for of_net, of_h in both:
                of_net.add_(of_h)
        return net


@dataclass
class FedLC(Balanced):
    tau: float = 1.0

    def loss(self, k: int, out: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(out - self.tau * self.counts(k).clamp(min=1e-8) ** -0.25, y)


@dataclass
class FedRS(Balanced):
    alpha: float = 0.5

    def loss(self, k: int, out: Tensor, y: Tensor) -> Tensor:
        scale = self.alpha + (1 - self.alpha) * (self.counts(k) > 0).double()
        return cross_entropy(out * scale, y)


@dataclass
class FedDecorr(Personal):
    beta: float = 0.1

    def term(
        self, k: int, net: nn.Module, sent: nn.Module, x: Tensor, y: Tensor, z: Tensor, out: Tensor
    ) -> Tensor:
        z = (z - z.mean(0)) / (z.var(0, unbiased=False) + 1e-8).sqrt()
        correlation = z.T @ z / len(z)
        squares: Tensor = torch.linalg.matrix_norm(correlation) ** 2
        return self.beta * squares / z.shape[1] ** 2


@dataclass
class FedProto(Personal):
    lam: float = 1.0
    prototypes: dict[int, Tensor] = field(default_factory=dict)

    def term(
        self, k: int, net: nn.Module, sent: nn.Module, x: Tensor, y: Tensor, z: Tensor, out: Tensor
    ) -> Tensor:
        target = [self.prototypes.get(int(c), f.detach()) for c, f in zip(y, z, strict=True)]
        return self.lam * mse_loss(z, torch.stack(target))

    def average(self, teachers: dict[int, nn.Module]) -> None:
        super().average(teachers)
        z = torch.cat([features(net, self.clients[k][0]) for k, net in teachers.items()])
        y = torch.cat([self.clients[k][1] for k in teachers])
        self.prototypes = {c: z[y == c].mean(0) for c in set(y.tolist())}


@dataclass
class FedAMP(Personal):
    lam: float = 1.0
    sigma: float = 1.0
    alpha: float | None = None
    cloud: dict[int, Numbers] = field(default_factory=dict)  # client -> its last model
    seen: dict[int, Numbers] = field(default_factory=dict)  # at the beginning of the round

    def train_locally(self, k: int, t: int) -> nn.Module:
        if t > self.now:
            self.seen = dict(self.cloud)
        return super().train_locally(k, t)

    def end(self, k: int, t: int, net: nn.Module, sent: nn.Module, steps: int) -> None:
        self.cloud[k] = numbers(net)

    def mixture(self, k: int, alpha: float) -> Numbers:
        xi = {}
        for j, w in self.seen.items():
            apart = sum(float((w[n] - self.seen[k][n]).square().sum()) for n in w)
            xi[j] = alpha / self.sigma * math.exp(-apart / self.sigma)
        xi[k] = 1 - sum(value for j, value in xi.items() if j != k)
        names = self.seen[k]
        return {n: torch.stack([xi[j] * w[n] for j, w in self.seen.items()]).sum(0) for n in names}

    def term(
        self, k: int, net: nn.Module, sent: nn.Module, x: Tensor, y: Tensor, z: Tensor, out: Tensor
    ) -> Tensor:
        if k not in self.seen:
            return torch.zeros((), dtype=torch.float64)
        alpha = self.alpha or self.sigma / len(self.clients)
        u = self.mixture(k, alpha)
        apart = [(w - u[n]).square().sum() for n, w in net.named_parameters()]
        return self.lam / 2 * torch.stack(apart).sum()


@dataclass
class FedALA(Personal):
    ala_epochs: int = 1
    ala_lr: float = 1.0

    def __post_init__(self) -> None:
        clients = range(len(self.clients))
        self.v = {k: copy.deepcopy(self.net) for k in clients}
        head = numbers(self.net)
        self.weights = {
            k: {n: torch.ones_like(head[n]) for n in head_names(self.net)} for k in clients
        }

    def judged(self, k: int) -> nn.Module:
        return self.v[k]

    def mix(self, k: int, u: nn.Module) -> None:
        """Set the head of u to the mixture of the own and the shared head."""
        own, shared = numbers(self.v[k]), numbers(self.net)
        mixed = {n: own[n] + (shared[n] - own[n]) * w for n, w in self.weights[k].items()}
        u.load_state_dict({**u.state_dict(), **mixed})

    def train_locally(self, k: int, t: int) -> nn.Module:
        u, batches = self.client_view(k).train(), self.batches(k, t)
        own, shared = numbers(self.v[k]), numbers(self.net)
        optimiser = self.optimiser(u.parameters(), lr=self.rate(t))
        each = -(-len(self.clients[k][1]) // self.reads.batch_size)
        self.mix(k, u)
        for x, y in batches[: self.ala_epochs * each]:
            g = slopes(u, x, y)
            for n, w in self.weights[k].items():
                moved = w - self.ala_lr * g[n] * (shared[n] - own[n])
                self.weights[k][n] = moved.clamp(0, 1)
            self.mix(k, u)
        for x, y in batches[self.ala_epochs * each :]:
            self.step_on(optimiser, u, x, y)
        self.v[k] = u
        return u


@dataclass
class FedFish(Personal):
    epsilon: float = 1e-12
    fisher: dict[int, Numbers] = field(default_factory=dict)

    def train_locally(self, k: int, t: int) -> nn.Module:
        w, batches = self.client_view(k).train(), self.batches(k, t)
        optimiser = self.optimiser(w.parameters(), lr=self.rate(t))
        each = -(-len(self.clients[k][1]) // self.reads.batch_size)
        for x, y in batches[:-each]:
            self.step_on(optimiser, w, x, y)
        squares = [{n: g.square() for n, g in slopes(w, x, y).items()} for x, y in batches[-each:]]
        self.fisher[k] = {n: torch.stack([s[n] for s in squares]).mean(0) for n in squares[0]}
        return w

    def average(self, teachers: dict[int, nn.Module]) -> None:
        super().average(teachers)
        mean = {}
        for n in self.fisher[next(iter(teachers))]:
            weights = {
                k: len(self.clients[k][1]) * (self.fisher[k][n] + self.epsilon) for k in teachers
            }
            total = torch.stack(list(weights.values())).sum(0)
            parts = [weights[k] * numbers(net)[n] for k, net in teachers.items()]
            mean[n] = torch.stack(parts).sum(0) / total
        self.put(mean)
