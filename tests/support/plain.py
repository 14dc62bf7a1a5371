"""FedDKD and its relatives once more, in plain PyTorch: modules, torch.optim, autograd, loops.
Nothing here calls the package's mathematics; only who is active and who reads which examples when
is taken from it, since that is a choice and not a formula.

Written from the paper's Algorithms 1 to 5 and from the formulas of the methods' own papers.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, mse_loss, softmax

from feddkd.data.batches import Reads, draw
from feddkd.rounds.loop import choose

Pair = tuple[Tensor, Tensor]
# (local net, net that was sent, features) -> what is added to the loss
Extra = Callable[[nn.Module, nn.Module, Tensor], Tensor]


@dataclass
class Plain:
    """One federated run, as a beginner would write it."""

    net: nn.Module  # the global model
    clients: list[Pair]
    seed: int
    reads: Reads
    optimiser: Callable[..., torch.optim.Optimizer]
    lr: float
    lr_decay: float = 1.0
    extra: Extra | None = None
    # steps, batch_size, lr, lr_decay, lr_step_decay, warmup, student, by_round, by_step
    dkd: dict[str, Any] | None = None
    private: Callable[[str], bool] = lambda name: False
    own: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # client -> its private tensors
    dkd_phase: int = 1  # DKD's place among the method's phases, counted from 0
    by_round: Callable[[int], float] = lambda t: 1.0  # factors of lr
    by_step: Callable[[int], float] = lambda j: 1.0
    max_norm: float | None = None  # of a gradient

    def run(self, rounds: int, cohort: int) -> None:
        for t in range(1, rounds + 1):
            active = choose(self.seed, t, len(self.clients), cohort)
            teachers = {k: self.train_locally(k, t) for k in active}
            self.average(teachers)
            if self.dkd is not None and t > self.dkd.get("warmup", 0):
                for j in range(1, self.dkd["steps"] + 1):
                    self.distil(teachers, t, j)

    def client_view(self, k: int) -> nn.Module:
        """The global model with client k's private tensors in place."""
        net = copy.deepcopy(self.net)
        net.load_state_dict({**net.state_dict(), **self.own.get(k, {})})
        return net

    def train_locally(self, k: int, t: int) -> nn.Module:
        sent, net, (x, y) = self.client_view(k), self.client_view(k).train(), self.clients[k]
        features: list[Tensor] = []
        last = [module for module in net.modules() if isinstance(module, nn.Linear)][-1]
        last.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
        optimiser = self.optimiser(net.parameters(), lr=self.rate(t))
        for j, indices in enumerate(draw(self.reads, len(y), (self.seed, t, 0, 1, k)), 1):
            loss = cross_entropy(net(x[indices]), y[indices])
            if self.extra is not None:
                loss = loss + self.extra(net, sent, features[-1])
            parameters = list(net.parameters())
            for parameter, gradient in zip(
                parameters, torch.autograd.grad(loss, parameters), strict=True
            ):
                parameter.grad = gradient
            self.step(optimiser, net, t, j)
        last._forward_pre_hooks.clear()
        return net

    def rate(self, t: int) -> float:
        return self.lr * self.lr_decay ** (t - 1) * self.by_round(t)

    def step(self, optimiser: torch.optim.Optimizer, net: nn.Module, t: int, j: int) -> None:
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), self.max_norm)
        for group in optimiser.param_groups:
            group["lr"] = self.rate(t) * self.by_step(j)
        optimiser.step()

    def average(self, teachers: dict[int, nn.Module]) -> None:
        total = sum(len(self.clients[k][1]) for k in teachers)
        state = self.net.state_dict()
        for name in state:
            if self.private(name):
                for k, net in teachers.items():
                    self.own.setdefault(k, {})[name] = net.state_dict()[name].clone()
            elif state[name].is_floating_point():
                state[name] = sum(
                    len(self.clients[k][1]) / total * net.state_dict()[name]
                    for k, net in teachers.items()
                )
            else:
                state[name] = torch.stack(
                    [net.state_dict()[name] for net in teachers.values()]
                ).max()
        self.net.load_state_dict(state)

    def distil(self, teachers: dict[int, nn.Module], t: int, j: int) -> None:
        assert self.dkd is not None
        sums = {
            name: torch.zeros_like(parameter)
            for name, parameter in self.net.named_parameters()
            if not self.private(name)
        }
        for k in teachers:
            (indices,) = draw(
                Reads(self.dkd["batch_size"], steps=1),
                len(self.clients[k][1]),
                (self.seed, t, self.dkd_phase, j, k),
            )
            x, student = self.clients[k][0][indices], self.client_view(k).eval()
            if self.dkd.get("student") == "batch":
                student.train()
            with torch.no_grad():
                taught = self.taught(teachers, k, j, indices)
            loss = -(taught * log_softmax(student(x), dim=1)).sum(dim=1).mean()
            shared = [parameter for name, parameter in student.named_parameters() if name in sums]
            for name, gradient in zip(sums, torch.autograd.grad(loss, shared), strict=True):
                sums[name] += gradient
        gamma = (
            self.dkd["lr"]
            * self.dkd.get("lr_decay", 1.0) ** (t - 1)
            * self.dkd.get("lr_step_decay", 1.0) ** (j - 1)
            * self.dkd.get("by_round", lambda t: 1.0)(t)
            * self.dkd.get("by_step", lambda j: 1.0)(j)
        )
        with torch.no_grad():
            for name, parameter in self.net.named_parameters():
                if name in sums:
                    parameter.sub_(gamma * sums[name] / len(teachers))

    def taught(self, teachers: dict[int, nn.Module], k: int, j: int, indices: Any) -> Tensor:
        """Return what client k learns from in step j: its own model's distribution."""
        return softmax(copy.deepcopy(teachers[k]).eval()(self.clients[k][0][indices]), dim=1)


def proximal_sum(mu: float) -> Extra:
    def extra(net: nn.Module, sent: nn.Module, features: Tensor) -> Tensor:
        pairs = zip(net.parameters(), sent.parameters(), strict=True)
        return (
            mu
            / 2
            * torch.cat([(w - start.detach()).flatten() for w, start in pairs]).square().sum()
        )

    return extra


def proximal_mean(mu: float) -> Extra:
    def extra(net: nn.Module, sent: nn.Module, features: Tensor) -> Tensor:
        pairs = zip(net.parameters(), sent.parameters(), strict=True)
        return mu / 2 * torch.stack([mse_loss(w, start.detach()) for w, start in pairs]).sum()

    return extra


def fedmax_code(beta: float) -> Extra:
    """Return the term of the published code: KLDivLoss with its default reduction."""

    def extra(net: nn.Module, sent: nn.Module, features: Tensor) -> Tensor:
        uniform = torch.full_like(features, 1 / features.shape[1])
        return beta * (uniform * (uniform.log() - log_softmax(features, dim=1))).mean()

    return extra


def fedmax_paper(beta: float) -> Extra:
    """Return the term of FedDKD's paper: beta 1/B sum KL(a || U)."""

    def extra(net: nn.Module, sent: nn.Module, features: Tensor) -> Tensor:
        log_uniform = torch.full_like(features, 1 / features.shape[1]).log()
        return beta * kl_div(log_uniform, softmax(features, dim=1), reduction="batchmean")

    return extra
